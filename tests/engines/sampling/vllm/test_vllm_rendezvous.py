"""The rendezvous of vLLM's workers; nothing here needs vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.sampling.vllm import versions
from rlcore.process.guard import FAMILY, NAMED_MEMORY


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, of which one has the function, as in later versions."""
    package: Any = ModuleType("vllm.v1.executor")
    package.multiproc_executor = SimpleNamespace(get_file_store_init_method=lambda: "file:///tmp/a")
    package.uniproc_executor = SimpleNamespace()
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return package


def test_each_rendezvous_has_a_file_of_its_own_that_bears_the_workers_mark(
    executors: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FAMILY, "17-abc")
    versions._set_rendezvous_folder(str(tmp_path))
    assert vars(executors.uniproc_executor) == {}
    meet = executors.multiproc_executor.get_file_store_init_method
    first, second = Path(meet().removeprefix("file://")), Path(meet("a", of="later").removeprefix("file://"))
    assert first != second and first.parent == second.parent == tmp_path
    assert all("17-abc" in file.name and file.name.startswith(NAMED_MEMORY) for file in (first, second))
