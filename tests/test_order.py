"""The order in which files of tests begin."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import pytest_collection_modifyitems


def item(file: str, *timeout_s: int) -> Any:
    mark = SimpleNamespace(args=timeout_s) if timeout_s else None
    return SimpleNamespace(path=Path(file), get_closest_marker={"timeout": mark}.get)


def test_files_whose_tests_may_take_longest_begin_first_and_stay_together() -> None:
    items = [item("a"), item("e", 900), item("b"), item("b", 900), item("b"), item("c"), item("d", 1800), item("c")]
    pytest_collection_modifyitems(items)
    assert [str(each.path) for each in items] == ["d", "b", "b", "b", "e", "c", "c", "a"]
