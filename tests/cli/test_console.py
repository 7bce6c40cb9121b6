"""Tables on terminals of all widths: nothing that is to be read or pasted is folded within a word."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest

from rlcore.bench.compare import compare
from rlcore.cli import main as cli
from rlcore.cli.bench_output import print_comparison
from rlcore.cli.console import print_table, print_text
from tests.bench.records import a_record


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Terminal]:
    def make(columns: int) -> Terminal:
        found = Terminal()
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr("sys.stdout", found)
        return found

    return make


HEADER = ["case", "sizes", "median", "verdict"]
ROWS = [["kernels/linear_loss/8b", "N 4096", "12.3 ms", "about equal"], ["kernels/gae", "", "", "slower " * 10]]


def test_a_table_that_fits_folds_its_last_column_alone(terminal: Callable[[int], Terminal]) -> None:
    screen = terminal(80)
    print_table(HEADER, ROWS)
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    assert lines[0].split() == HEADER
    assert re.split(r" {2,}", lines[2].strip()) == ["kernels/linear_loss/8b", "N 4096", "12.3 ms", "about equal"]
    assert len(lines) == 5 and {*lines[4].split()} == {"slower"}
    assert max(map(len, lines)) <= 80


def test_a_table_that_does_not_fit_is_a_block_for_each_row(terminal: Callable[[int], Terminal]) -> None:
    screen = terminal(50)
    print_table(HEADER, ROWS)
    assert [line.rstrip() for line in screen.getvalue().splitlines()] == [
        "kernels/linear_loss/8b",
        "    sizes N 4096  median 12.3 ms",
        "    verdict about equal",
        "kernels/gae",
        "    verdict slower slower slower slower slower",
        "      slower slower slower slower slower",
    ]


@pytest.mark.parametrize("columns", [40, 80, 120, 300])
def test_a_comparison_folds_no_word(terminal: Callable[[int], Terminal], columns: int) -> None:
    first, second = a_record(), a_record(2.0, accelerator_model_name="NVIDIA H200")
    screen = terminal(columns)
    print_comparison(compare(first, second, names=("first", "second")))
    shown = screen.getvalue()
    words = {"kernels/linear_logprob/8b", "collectives/all_reduce", "too few samples", "NVIDIA H200", "first", "second"}
    flat = re.sub(r"\s+", " ", shown)
    assert [word for word in words if word not in flat] == []
    assert max(map(len, shown.splitlines())) <= columns


def test_a_terminal_folds_a_sentence_between_words(terminal: Callable[[int], Terminal]) -> None:
    screen = terminal(20)
    print_text("It is [bold] and about equal")
    assert [line.rstrip() for line in screen.getvalue().splitlines()] == ["It is [bold] and", "about equal"]


@pytest.mark.parametrize("columns", [40, 80])
def test_the_command_of_a_finding_is_one_line_that_can_be_pasted(
    terminal: Callable[[int], Terminal], columns: int
) -> None:
    command = f"rm -r {' '.join(f'/dev/shm/torch_{number}_0' for number in range(20))}"
    screen = terminal(columns)
    cli._print_findings([["python", "OK", "3.11", ""], ["leftovers", "WARN", "20 of dead processes", command]])
    assert screen.getvalue().splitlines()[-2:] == ["WARN leftovers: what to do", command]


@pytest.mark.parametrize("columns", [20, 80])
def test_a_cell_gives_the_terminal_no_command(terminal: Callable[[int], Terminal], columns: int) -> None:
    screen = terminal(columns)
    print_table(["pid", "\x1b[2J\x07"], [["7", "\x1b[2J\x1b]0;owned\x07\r\u202ecpu"]])
    cli._print_findings([["leftovers", "WARN", "one", "rm '\x1b[2J'"]])
    assert screen.getvalue().replace("\n", "").isprintable()
    assert r"\x1b[2J" in screen.getvalue()


@pytest.mark.parametrize("columns", [40, 80])
def test_without_colour_there_is_no_escape_code_at_all(terminal: Callable[[int], Terminal], columns: int) -> None:
    screen = terminal(columns)
    print_table(HEADER, ROWS)
    print_text("a sentence")
    assert "\x1b" not in screen.getvalue()
