"""docs/bench.md: its example is a case, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from rlcore.bench.case import load_cases
from rlcore.bench.measurement.measure import Sampling, run_case
from rlcore.cli.bench import bench
from rlcore.registry import get_device

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "bench.md").read_text()


def test_example_is_a_case_that_passes() -> None:
    """As it stands there, with its imports."""
    case_code, plugin_code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(case_code, names)
    registered: list[str] = []
    plugin: dict[str, Any] = {}
    exec(plugin_code, plugin)
    plugin["rlcore_register_benchmarks"](registered.append)
    assert registered == ["acme.cases:case"]
    (result,) = run_case(names["case"], get_device("cpu"), Sampling(min_samples=1, max_samples=1))
    assert (result.status, result.limits) == ("pass", {"memory": 2 * 4 << 20})


def test_every_folder_of_cases_is_in_the_table_and_no_other() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    named = {folder for row in rows for folder in re.findall(r"`(\w+)`", row)}
    assert named == {name.partition("/")[0] for name in load_cases()}


def test_every_command_and_option_of_the_page_exists() -> None:
    commands = get_command(bench).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"^rlcore bench (\w+)", PAGE, re.MULTILINE)) == set(commands)
    known = {option for command in commands.values() for parameter in command.params for option in parameter.opts}
    used = {"--benchmark", "--detach", *known}
    assert [option for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE) if option not in used] == []
