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

import pytest

from rlcore.quickstart.display import Display, print_table

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
    for part in ("step 7/20", "reward 0.350", "1,234 tokens/s", "generate 3.5 s (67%)", "train 1.8 s (33%)"):
        assert part in plain, part
    assert "warm-start [1/2]: a note" in plain
    assert re.search(r"│ output +│ out/\[run\] +│", plain)


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_no_colour_gets_plain_lines(env: dict[str, str]) -> None:
    process, keyboard, screen = start_on_terminal("0", **env)
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
