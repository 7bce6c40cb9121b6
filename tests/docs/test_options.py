"""The tables of options on pages name the options that there are, with their defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from rlcore import TrainEngine
from rlcore.cli.main import quickstart
from rlcore.engines.deepspeed.options import ZeroOptions
from rlcore.engines.fsdp2.sharding import Sharding

from .test_pages import ROOT


def told(page: str, head: str) -> dict[str, str]:
    """Option -> its default as a page writes it; "" where it tells none."""
    text = (ROOT / "docs" / page).read_text("utf-8").partition(head)[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))


def defaults(options: type) -> dict[str, Any]:
    made = options()
    return {one.name: getattr(made, one.name) for one in dataclasses.fields(options)}


def value_of(text: str) -> Any:
    """``"float32"``, ``50,000,000`` and ``1 GiB`` as values."""
    number = re.fullmatch(r"([\d,]+)( GiB)?", text)
    if number is not None:
        return int(number[1].replace(",", "")) << (30 if number[2] else 0)
    return {"True": True, "False": False, "`{}`": {}}.get(text, text.strip('`"'))


def test_options_of_a_train_engine() -> None:
    parameters = inspect.signature(TrainEngine.build).parameters.values()
    sizes = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    found = told("engines.md", "| option | default | |\n")
    assert found.pop("compute_dtype") == "`dtype`"
    wanted = sizes | {name: value for name, value in defaults(Sharding).items() if name not in sizes}
    del wanted["compute_dtype"]
    assert {name: value_of(text) for name, text in found.items()} == wanted


def test_options_of_the_quickstart() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text("utf-8").partition("## Options")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`--[^|]*) \|", text, re.MULTILINE)
    found = {name for row in rows for name in re.findall(r"--([a-z-]+)", row)}
    assert found == {name.replace("_", "-") for name in inspect.signature(quickstart).parameters}


def test_options_of_deepspeed() -> None:
    found = told("deepspeed.md", "| option | default | |\n")
    assert {name: value_of(text) for name, text in found.items()} == defaults(ZeroOptions)


def test_arguments_of_a_weight_sync() -> None:
    parameters = inspect.signature(TrainEngine.sync_weights).parameters
    found = told("weight_sync.md", "| argument | |\n")
    assert found.keys() == parameters.keys() - {"self", "target", "slab_bytes"}
    assert parameters["timeout_s"].default == float(re.findall(r"([\d.]+) s by default", found["timeout_s"])[0])


def test_a_default_is_read_as_it_is_written() -> None:
    written = ("True", "`{}`", '`"float32"`', "50,000", "1 GiB")
    assert [value_of(text) for text in written] == [True, {}, "float32", 50_000, 2**30]
