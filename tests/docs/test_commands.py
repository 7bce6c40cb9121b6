"""Commands, options and faults that pages name are there, and the pages that list them leave none out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command

from rlcore.chaos.faults import FAULTS
from rlcore.cli.main import app
from rlcore.planning.hardware import hardware

from .test_pages import PAGES, ROOT

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OF_PAGES = {"parity": "parity", "plan": "plan", "quickstart": "quickstart"}
"""Pages with a table of the options of one command. docs/bench.md has a test of its own."""


def options(command: Any) -> set[str]:
    return {"--help", *(name for one in command.params for name in (*one.opts, *one.secondary_opts))}


def wrong_calls(text: str) -> list[str]:
    """The commands and options in a text that are not there; what follows a program's name is the program's."""
    wrong = []
    for before, name, rest in re.findall(r"(^|`|\$ )rlcore ([a-z]+)([^`\n#]*)", text, re.MULTILINE):
        command = COMMANDS.get(name)
        if command is None:
            wrong += [name] if before else []  # a line of prose may begin with the word rlcore
            continue
        words = rest.split()
        inner = getattr(command, "commands", {}).get(words[0] if words else "")
        given = OPTION.findall(re.split(r"\S+\.py | rlcore ", rest)[0])
        wrong += [f"{name} {option}" for option in given if option not in options(inner or command)]
    return wrong


def test_every_command_and_option_of_a_page_exists() -> None:
    assert {str(page): wrong for page in PAGES if (wrong := wrong_calls(page.read_text("utf-8")))} == {}


def test_what_is_not_there_is_found() -> None:
    text = "`rlcore trian` `rlcore plan --cuont 2`\n$ rlcore bench run --quik\n$ rlcore trace a.py --theirs\nrlcore has"
    assert wrong_calls(text) == ["trian", "plan --cuont", "bench --quik"]


@pytest.mark.parametrize("name", OF_PAGES)
def test_options_in_the_tables_of_a_page_exist(name: str) -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / f"{name}.md").read_text("utf-8"), re.MULTILINE)
    found = [option for row in rows for option in OPTION.findall(row)]
    assert found and [option for option in found if option not in options(COMMANDS[OF_PAGES[name]])] == []


def test_the_page_of_commands_lists_every_command_and_the_page_of_faults_every_fault() -> None:
    commands = (ROOT / "docs" / "configuration.md").read_text("utf-8").partition("| exit code |")[0]
    assert set(re.findall(r"^\| `rlcore ([a-z]+)", commands, re.MULTILINE)) == COMMANDS.keys()
    faults = (ROOT / "docs" / "trust.md").read_text("utf-8").partition("## Faults")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", faults, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == FAULTS.keys()


def test_every_device_that_the_page_of_plans_names_can_be_planned_for() -> None:
    (row,) = re.findall(r"^\| `--device` \| (.*) \|$", (ROOT / "docs" / "plan.md").read_text("utf-8"), re.MULTILINE)
    names = re.findall(r"`(\w+)`", row)
    assert names == ["h200", "h100", "cpu"]
    assert all(hardware(name).total_bytes > 0 for name in names)
