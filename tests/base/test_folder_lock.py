"""A folder that one process at a time uses."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from rlcore import file_lock
from rlcore.file_lock import take_folder


def test_a_folder_is_held_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    held = take_folder(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError, match=str(tmp_path)):
        take_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor is left of the attempt"
    os.close(held)
    os.close(take_folder(tmp_path))


def test_a_file_system_without_locks_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    os.close(take_folder(tmp_path))
    assert fcntl.flock is flock


def test_a_folder_that_is_not_there_cannot_be_taken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        take_folder(tmp_path / "nothing")
