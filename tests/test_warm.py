"""A warm command is to its caller what ``python`` is."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.warm import kill, run_warm, warm

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
