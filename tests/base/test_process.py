"""Child processes: framed messages, a child that ends with its input, and the modules that it finds."""

from __future__ import annotations

import io
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rlcore.process.endings import crash_report, how_it_ended
from rlcore.process.framing import read_message, write_message
from rlcore.process.message_child import MessageChild
from rlcore.process.python_command import python_command
from rlcore.process.socket_address import socket_address

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
