"""What is shown is checked as it arrives: on a real pseudo-terminal, and in a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pytest

from rlcore.quickstart.display import Display, print_table
from rlcore.quickstart.output import PHASES

RUN = """
import sys, time
from rlcore.quickstart.display import Display, print_table
with Display(steps=20) as display:
    display.note("warm-start [1/2]: a note")
    for step in range(1, 21):
        display.update({"step": step, "reward": step / 20, "tokens_per_s": 1234.0, "generate_s": 0.5, "train_s": 0.25})
        time.sleep(float(sys.argv[1]))
print_table("Result", {"accuracy": "99.0 %", "output": "out/[run]"}, stream=sys.stderr)
"""
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def start_on_terminal(pause: str, **env: str) -> tuple[subprocess.Popen[bytes], int, int]:
    keyboard, screen = pty.openpty()
    termios.tcsetwinsize(screen, (24, 100))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, pause],
        stdout=subprocess.PIPE,
        stderr=screen,
        env=kept | {"TERM": "xterm"} | env,
    )
    return process, keyboard, screen


def read_to_end(keyboard: int, screen: int) -> str:
    """Everything shown by a process that has ended."""
    os.close(screen)
    shown = b""
    while True:
        try:
            data = os.read(keyboard, 65536)
        except OSError:  # how Linux says that the other side is closed
            data = b""
        if not data:
            os.close(keyboard)
            return shown.decode()
        shown += data


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_shows_the_run_live_and_gets_its_cursor_back() -> None:
    process, keyboard, screen = start_on_terminal("0")
    assert process.communicate()[0] == b""
    shown = read_to_end(keyboard, screen)
    assert shown.count(HIDE_CURSOR) == shown.count(SHOW_CURSOR) == 1
    assert shown.index(HIDE_CURSOR) < shown.index(SHOW_CURSOR)
    plain = without_codes(shown)
    for part in ("step 7/20", "reward 0.350", "1,234 tokens/s", "generate 4 s (67%)", "train 2 s (33%)"):
        assert part in plain, part
    assert "warm-start [1/2]: a note" in plain
    assert "output    out/[run]" in plain


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_no_colour_gets_plain_lines(env: dict[str, str]) -> None:
    process, keyboard, screen = start_on_terminal("0", COLUMNS="100", LINES="24", **env)
    assert process.communicate()[0] == b""
    shown = read_to_end(keyboard, screen)
    assert "\x1b" not in shown
    assert shown.splitlines() == [
        "warm-start [1/2]: a note",
        "step 10/20  reward 0.500  1,234 tokens/s  generate 5.0 s  train 2.5 s  sync 0.0 s  offload 0.0 s",
        "step 20/20  reward 1.000  1,234 tokens/s  generate 10.0 s  train 5.0 s  sync 0.0 s  offload 0.0 s",
        "Result",
        "accuracy  99.0 %",
        "output    out/[run]",
    ]


def test_a_plain_line_that_is_wider_than_the_terminal_is_two() -> None:
    process, keyboard, screen = start_on_terminal("0", NO_COLOR="1", COLUMNS="80")
    process.communicate()
    assert read_to_end(keyboard, screen).splitlines()[1:3] == [
        "step 10/20  reward 0.500  1,234 tokens/s",
        "    generate 5.0 s  train 2.5 s  sync 0.0 s  offload 0.0 s",
    ]


def test_ctrl_c_gives_the_terminal_back_as_it_was() -> None:
    process, keyboard, screen = start_on_terminal("1")
    before = termios.tcgetattr(screen)
    shown = ""
    while "step 2/20" not in without_codes(shown):
        shown += os.read(keyboard, 65536).decode(errors="ignore")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == -signal.SIGINT
    assert termios.tcgetattr(screen) == before
    shown += read_to_end(keyboard, screen)
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(HIDE_CURSOR)
    assert "Result" not in shown


def test_a_pipe_gets_a_line_every_tenth_step_and_for_the_last() -> None:
    stream = io.StringIO()
    with Display(steps=25, stream=stream) as display:
        for step in range(1, 26):
            measured = {"accuracy": 0.5} if step == 5 else {}
            display.update({"step": step, "reward": 1.0, "sync_s": 0.1, **measured})
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 10/25", "step 20/25", "step 25/25"]
    assert lines[-1] == (
        "step 25/25  reward 1.000  accuracy 50.0%  generate 0.0 s  train 0.0 s  sync 2.5 s  offload 0.0 s"
    )


def test_forced_colours_do_not_make_a_pipe_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with Display(steps=1, stream=stream) as display:
        display.update({"step": 1, "reward": 0.0})
    assert "\x1b" not in stream.getvalue()


def test_a_long_row_of_the_table_is_not_wrapped() -> None:
    stream = io.StringIO()
    print_table("Result", {"output": "x" * 300}, stream=stream)
    assert stream.getvalue() == f"Result\noutput  {'x' * 300}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[Display], list[str]]:
    """The picture that a terminal of 80 columns has of a run."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")

    def picture(display: Display) -> list[str]:
        lines = display._console.render_lines(display._panel(), pad=False)
        return ["".join(segment.text for segment in line).rstrip() for line in lines]

    return picture


def test_loading_says_what_it_loads_and_no_zeros(shown: Callable[[Display], list[str]]) -> None:
    display = Display(steps=100, stream=Terminal())
    display.doing("starting the sampler")
    assert shown(display) == ["starting the sampler  0 s"]


def test_the_warm_start_says_how_long_it_will_take(
    shown: Callable[[Display], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    display, moment = Display(steps=100, stream=Terminal()), Moment(monkeypatch)
    for step in range(101):
        moment.seconds = 20 + step * 0.5
        display.imitating(step, 0.12, wanted=0.47, usual=(150, 450))
    monkeypatch.setattr(display, "_started", 0.0)
    assert shown(display) == [
        "warm-start step 100 of 150 to 450, 25 s to 175 s left  70 s",
        "sampled accuracy 12.0% of 47% wanted",
    ]
    moment.seconds += 100
    display.imitating(300, 0.4, wanted=0.47, usual=(150, 450))
    assert shown(display)[0] == "warm-start step 300 of 150 to 450, up to 75 s left  170 s"


def test_no_line_of_a_run_is_wider_than_80_columns_with_what_ctrl_c_echoes(
    shown: Callable[[Display], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    display, moment = Display(steps=10_000, stream=Terminal()), Moment(monkeypatch)
    figures = {"reward": 0.5, "accuracy": 1.0, "parity": 1e-6, "tokens_per_s": 123_456_789}
    display.update({"step": 0})
    spent = {f"{phase}_s": 99_999.0 for phase in PHASES}
    moment.seconds = 3000
    display.update({"step": 100, **figures, **spent})
    display.stopping("stopping after this step; press Ctrl-C again to stop at once")
    lines = shown(display)
    assert [line.split()[0] for line in lines] == ["step", "reward", "generate", "stopping"]
    assert lines[0].endswith("about 4950 min left")
    assert max(map(len, lines)) <= 80 - len("^C") - 1


class Moment:
    """The clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr("rlcore.quickstart.display.time.monotonic", lambda: self.seconds)


def test_that_it_stops_is_said_in_a_pipe_at_once_and_on_a_terminal_in_the_picture(
    shown: Callable[[Display], list[str]],
) -> None:
    """A line between two pictures leaves the first of them behind."""
    pipe, terminal = Display(steps=1, stream=io.StringIO()), Display(steps=1, stream=Terminal())
    for display in (pipe, terminal):
        display.stopping("stopping")
    assert pipe._console.file.getvalue() == "stopping\n"  # type: ignore[attr-defined]
    assert terminal._console.file.getvalue() == ""  # type: ignore[attr-defined]
    assert shown(terminal)[-1] == "stopping"


def test_ctrl_c_amid_a_line_is_answered_all_the_same() -> None:
    class Amid(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

        def fileno(self) -> int:
            return write

    read, write = os.pipe()
    Display(steps=9, stream=Amid()).stopping("stopping after this step")
    os.close(write)
    with open(read) as told:
        assert told.read() == "stopping after this step\n"


def test_the_time_shown_goes_on_between_steps() -> None:
    process, keyboard, screen = start_on_terminal("100")
    shown = ""
    deadline = time.monotonic() + 90
    while "1/20" not in without_codes(shown) or " 2 s" not in without_codes(shown):
        assert time.monotonic() < deadline, shown
        shown += os.read(keyboard, 65536).decode(errors="ignore")
    process.kill()
    process.communicate()
    read_to_end(keyboard, screen)
    assert "step 2/20" not in without_codes(shown)
