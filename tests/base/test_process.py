"""Child processes: framed messages, a child that ends with its input, and the modules that it finds."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlcore.conformance.ends import wait_until
from rlcore.process import status
from rlcore.process.endings import CONNECTION_LOST, crash_report, how_it_ended
from rlcore.process.framing import read_message, write_message
from rlcore.process.guard import shared_memory
from rlcore.process.memory_kills import MemoryKills
from rlcore.process.message_child import MessageChild
from rlcore.process.python_command import python_command
from rlcore.process.socket_address import socket_address
from rlcore.process.status import process_name, start_time

PROGRAM = """\
import sys, time
from rlcore.process.framing import read_message, take_standard_output, write_message

def serve(name):
    answers = take_standard_output()
    print("what is printed is no message")
    while (request := read_message(sys.stdin.buffer)) is not None:
        write_message(answers, [name, request])

def hang():
    sys.stdin.buffer.read()
    time.sleep(600)

def exit():
    sys.exit(3)
"""


class Pair(msgspec.Struct):
    left: int
    right: str


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only ``sys.path`` of this process leads to."""
    (tmp_path / "program_of_a_child.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def child() -> Iterator[MessageChild]:
    found = MessageChild(python_command("program_of_a_child:serve", "echo"))
    yield found
    found.close(60)


def test_messages_arrive_in_their_order_and_as_their_type() -> None:
    pipe = io.BytesIO()
    for message in (Pair(1, "a"), {"b": [2.5, None, b"\0"]}):
        write_message(pipe, message)
    pipe.seek(0)
    assert read_message(pipe, Pair) == Pair(1, "a")
    assert read_message(pipe) == {"b": [2.5, None, b"\0"]}
    assert read_message(pipe) is None


@pytest.mark.parametrize("left_out", [1, 4, 11])
def test_a_message_whose_writer_ended_within_it_is_none(left_out: int) -> None:
    pipe = io.BytesIO()
    write_message(pipe, "text")  # 8 bytes of length, 5 of text
    assert read_message(io.BytesIO(pipe.getvalue()[:-left_out])) is None


def test_a_child_answers_and_ends_when_its_input_ends(child: MessageChild) -> None:
    for number in range(3):
        child.send(number)
    assert [child.receive() for _ in range(3)] == [["echo", 0], ["echo", 1], ["echo", 2]]
    assert child.is_alive
    assert child.close(60) == 0
    assert not child.is_alive


def test_a_child_that_was_killed_gives_no_message(child: MessageChild) -> None:
    child.kill()
    assert child.receive() is None
    assert child.close(60) == -signal.SIGKILL


def test_a_child_that_does_not_end_is_killed() -> None:
    assert MessageChild(python_command("program_of_a_child:hang")).close(0.1) == -signal.SIGKILL


def test_the_exit_code_of_a_child_is_returned() -> None:
    assert MessageChild(python_command("program_of_a_child:exit")).close(60) == 3


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (-11, "was killed by SIGSEGV"),
        (-9, "was killed by SIGKILL (sent by somebody, or by the kernel for want of memory)"),
        (-50, "was killed by signal 50"),
        (
            CONNECTION_LOST,
            "ended with exit code 89, which says that it lost the connection to its parent (something in it may have "
            "closed file descriptors that are not its own; what it printed says more)",
        ),
    ],
)
def test_the_end_of_a_process_is_said_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words


def test_the_last_crash_is_found_in_a_log() -> None:
    crash = "Fatal Python error: Segmentation fault\n  File ..."
    assert crash_report(f"a line\nFatal Python error: an earlier one\n{crash}") == crash
    assert crash_report("a line") == ""


def test_a_socket_in_a_deep_folder_is_listened_at_and_connected_to(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 40)
    folder.mkdir()
    for path in (folder / "s", str(folder / "t")):
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
            with socket_address(path) as address:
                listener.bind(address)
            listener.listen()
            assert Path(path).is_socket()
            with socket_address(path) as address:
                other.connect(address)
    with pytest.raises(FileNotFoundError), socket_address(folder / "none" / "s"):
        pass


# -------------------------------------------------------------------------------------------- kills for memory


def write_counts(root: Path, version: int, own: int | None, machine: int | None, limit: str = "1000") -> None:
    """Files like the kernel's, for a process in the group "/pod/box"."""
    (root / "membership").write_text("0::/pod/box\n" if version == 2 else "4:memory:/pod/box\n0::/\n")
    group = root / "pod" / "box" if version == 2 else root / "memory" / "pod" / "box"
    group.mkdir(parents=True, exist_ok=True)
    counter, limit_file = ("memory.events", "max") if version == 2 else ("memory.oom_control", "limit_in_bytes")
    (group / f"memory.{limit_file}").write_text(f"{limit}\n")
    if own is not None:
        (group / counter).write_text(f"under_oom 0\noom_kill {own}\n")
    if machine is not None:
        (root / "vmstat").write_text(f"pgfault 7\noom_kill {machine}\n")


NO_LIMIT_V1 = str((1 << 63) - 4096)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (
            (1, 1),
            (2, 2),
            r"by the kernel for want of memory: the control group .*/pod/box, whose limit is 1000 bytes, counts 1 such "
            "kill since the process began",
        ),
        ((0, 0), (2, 2), r"the control group .*/pod/box, whose limit is 1000 bytes, counts 2 such kills since"),
        ((1, 1), (1, 2), "by the kernel for want of memory, perhaps: this machine counts 1 such kill since"),
        ((1, 1), (1, 1), "^sent by somebody: the kernel has counted no kill for want of memory since"),
        ((None, 1), (None, 1), "^sent by somebody: the kernel has counted no kill"),
        ((None, None), (None, None), "^sent by somebody, or by the kernel for want of memory$"),
    ],
)
def test_a_kill_for_want_of_memory_is_told_from_others(
    tmp_path: Path, version: int, before: tuple[Any, Any], after: tuple[Any, Any], text: str
) -> None:
    write_counts(tmp_path, version, *before)
    kills = MemoryKills(tmp_path / "membership", tmp_path, tmp_path / "vmstat")
    write_counts(tmp_path, version, *after)
    assert re.search(text, kills.explanation())


@pytest.mark.parametrize(("version", "limit"), [(1, NO_LIMIT_V1), (2, "max")])
def test_a_group_without_a_limit_counts_too(tmp_path: Path, version: int, limit: str) -> None:
    write_counts(tmp_path, version, 0, 0, limit)
    kills = MemoryKills(tmp_path / "membership", tmp_path, tmp_path / "vmstat")
    write_counts(tmp_path, version, 1, 1, limit)
    assert re.search(r"the control group .*/pod/box counts 1 such kill since the process", kills.explanation())


def test_counts_of_a_group_that_has_gone_are_no_error(tmp_path: Path) -> None:
    write_counts(tmp_path, 2, 1, None)
    kills = MemoryKills(tmp_path / "membership", tmp_path, tmp_path / "vmstat")
    shutil.rmtree(tmp_path / "pod")
    assert kills.explanation().startswith("sent by somebody")


ORPHAN = """
import multiprocessing, os, sys, time
from rlcore.process.orphan import end_without

def child(when):
    parent = multiprocessing.parent_process()
    print(os.getpid(), flush=True)
    while when == "late" and parent.is_alive():
        time.sleep(0.01)
    end_without(parent, 0.1)
    time.sleep(60)

if __name__ == "__main__":
    when, method = sys.argv[1:]
    multiprocessing.get_context(method).Process(target=child, args=(when,)).start()
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("when", "method"), [("in time", "fork"), ("late", "fork"), ("in time", "spawn"), ("in time", "forkserver")]
)
def test_a_process_ends_some_time_after_its_parent(when: str, method: str, tmp_path: Path) -> None:
    """Also one that first asks for it when the parent has ended."""
    program = tmp_path / "orphan.py"
    program.write_text(ORPHAN)
    command = [sys.executable, str(program), when, method]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        began = start_time(child)
        time.sleep(0.3)
        assert began is not None and start_time(child) == began, "its parent runs"
        parent.kill()
        wait_until(lambda: start_time(child) != began, "it did not end")


def test_processes_whose_name_and_memory_have_bytes_that_are_no_text_are_seen(tmp_path: Path) -> None:
    program = os.path.join(os.fsencode(tmp_path), b"\xff\xfe")
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "60"]) as process:
        try:
            assert process.pid in status.family_of(os.getpid())
            assert shared_memory([process.pid]) == set()
        finally:
            process.kill()


def test_who_cannot_look_does_not_take_a_process_for_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_text", full)
    with pytest.raises(OSError, match="Too many open files"):
        status.start_time(os.getpid())


HIDING = """
mount -t proc -o hidepid=1 proc /proc
setpriv --reuid 65534 --regid 65534 --clear-groups sleep 60 &
exec setpriv --regid 65534 --clear-groups --bounding-set -all --inh-caps -all "$@"
"""
LOOK = """
import os, time
from rlcore.process.status import family_of
(other,) = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
while os.stat(f"/proc/{other}").st_uid == os.getuid():
    time.sleep(0.01)
print(family_of(os.getpid()) == {os.getpid()})
"""


@pytest.mark.hosts
def test_processes_that_a_mount_of_proc_hides_are_passed_over() -> None:
    """With hidepid=1 those of other users are listed, and cannot be read."""
    made = ["unshare", "--mount", "--pid", "--fork", "sh", "-ec", HIDING, "sh"]
    told = subprocess.run([*made, sys.executable, "-c", LOOK], capture_output=True, text=True, check=False)
    assert told.stdout.strip() == "True", told.stderr


def test_a_process_has_a_name_that_no_other_has_on_any_host(monkeypatch: pytest.MonkeyPatch) -> None:
    own = process_name(os.getpid())
    assert own == process_name(os.getpid()) != process_name(os.getppid())
    for fact in ("boot_id", "pid_namespace", "start_time"):  # of another host, container, time
        with monkeypatch.context() as patch:
            patch.setattr(status, fact, lambda *_: "another")
            assert process_name(os.getpid()) != own
