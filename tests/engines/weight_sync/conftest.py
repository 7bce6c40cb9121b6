"""The small engine can be imported, here and in the processes that tests start; exports have short paths."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _runtime(_no_settings_from_outside: None, short_runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
