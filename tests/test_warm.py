"""A warm command is to its caller what ``python`` is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import warm as warm_module
from tests import warm_process
from tests.warm import WarmPopen, kill, run_warm, warm

SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def started(code: str) -> tuple[subprocess.Popen[str], int]:
    """A command, and the process id of its program."""
    command = [*warm(), "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_program_has_its_arguments_folder_environment_and_path(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['SOME'], sys.path[:2])"
    )
    (tmp_path / "elsewhere").mkdir()
    env = {"SOME": "value", "PYTHONPATH": "/first"}
    for arguments, first in (
        (["-m", "own"], str(tmp_path)),
        ([str(tmp_path / "own.py")], str(tmp_path)),
        (["-c", (tmp_path / "own.py").read_text()], ""),
    ):
        result = run_warm([*arguments, "a", "b c"], env=env, cwd=tmp_path)
        assert result.stdout == f"{['a', 'b c']} {tmp_path} value {[first, '/first']}\n", result.stderr


def test_torch_is_there_and_nothing_of_rlcore() -> None:
    code = "import sys; print('torch' in sys.modules, [name for name in sys.modules if name.startswith('rlcore')])"
    assert run_warm(code).stdout == "True []\n"


@pytest.mark.parametrize(
    ("code", "returncode", "error"),
    [
        ("print(1)", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, "no"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(lambda: print('left'))", 0, ""),
    ],
)
def test_a_program_ends_the_command_as_it_ends(code: str, returncode: int, error: str) -> None:
    result = run_warm(code)
    assert (result.returncode, result.stderr.splitlines()[-1:]) == (returncode, [error] if error else [])
    assert result.stdout == {0: "left\n" if "atexit" in code else "1\n"}.get(returncode, "")


def test_what_is_sent_to_the_command_reaches_the_program() -> None:
    process, _ = started(SLEEPS)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


def test_a_program_that_was_killed_has_ended() -> None:
    process, pid = started(SLEEPS)
    kill(process)
    assert process.returncode == -signal.SIGKILL
    assert not os.path.exists(f"/proc/{pid}")
    process.communicate()


def test_a_program_whose_command_is_killed_ends_soon() -> None:
    process, _ = started(SLEEPS)
    process.kill()
    assert process.communicate(timeout=120)[0] == ""  # the pipe ends with the program


def worker(code: str, **options: Any) -> WarmPopen:
    return WarmPopen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def test_a_worker_is_a_child_of_its_maker_with_what_it_was_given() -> None:
    """Also for others: `rlcore ps` and guards read its environment in /proc."""
    ours, theirs = os.pipe()
    code = f"""
        import os, sys
        print(os.getpid(), os.getppid(), os.getsid(0), "torch" in sys.modules, flush=True)
        os.write({theirs}, open("/proc/self/environ", "rb").read().strip(bytes(1)))
    """
    process = worker(textwrap.dedent(code), pass_fds=[theirs], env={"A": "b", "HOME": "/"}, stdin=subprocess.DEVNULL)
    os.close(theirs)
    with process, open(ours, "rb") as told:
        assert process.communicate() == (f"{process.pid} {os.getpid()} {process.pid} True\n".encode(), None)
        assert told.read() == b"A=b\0HOME=/"
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL])
def test_a_worker_that_crashes_has_ended_by_that_signal(number: int) -> None:
    """abort() asks for the id of its thread, which must be its own."""
    code = f"import os; os.abort() if {number == signal.SIGABRT} else os.kill(os.getpid(), {number})"
    with worker(code, env=dict(os.environ)) as process:
        assert process.wait() == -number


def test_where_the_kernel_makes_no_sibling_a_worker_begins_as_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_process, "request", lambda *_: -1)
    monkeypatch.setattr(warm_module, "_started", lambda *_: "")
    with worker("import sys; print('torch' in sys.modules)", env=dict(os.environ)) as process:
        assert process.communicate()[0] == b"False\n"
