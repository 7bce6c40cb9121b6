"""A folder with a model in which `rlcore train` runs, and which its reward functions are imported from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlcore.quickstart.model import quickstart_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quickstart's model, in the folder of the test, which is the present one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("judge", "sevens"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return quickstart_model(seed=0, cache=tmp_path / "cache")
