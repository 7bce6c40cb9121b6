"""Folders that are put in the place of others, as exports are."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from rlcore.engines.checkpoints import folder_swap
from rlcore.engines.checkpoints.folder_swap import new_folder, put_in_place, remove_unfinished
from tests.engines.kills import killed_at


def put(folder: Path, text: str) -> None:
    """Replace a folder by one of two files, as an export does."""
    remove_unfinished(folder)
    with new_folder(folder) as new:
        for name in ("a", "b"):
            (new / name).write_text(text)
        put_in_place(new, folder)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_kill_at_any_moment_leaves_the_earlier_folder_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:  # as on a network file system
        monkeypatch.setattr(folder_swap, "exchange", lambda *_: False)
    folder = tmp_path / "model"
    put(folder, "0")
    found, number, is_killed = [0], 0, True
    while is_killed:
        number += 1
        assert number < 200, "what is left grows with every kill"
        is_killed = killed_at(number, lambda: put(folder, str(number)))  # noqa: B023
        if not at_once:
            remove_unfinished(folder)
        texts = {(folder / name).read_text() for name in ("a", "b")}
        assert texts in ({str(found[-1])}, {str(number)})
        found.append(int(texts.pop()))
    assert found.count(0) > 5 and len(set(found)) > 3, "killed before it was put in place, and after"
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing of the killed ones is left"


@pytest.mark.parametrize("moment", ["before it has the marker", "before it is locked"])
def test_a_new_folder_that_another_process_takes_for_left_behind_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = tmp_path / "model"
    name = {"before it has the marker": "open", "before it is locked": "flock"}[moment]
    owner: Any = os if name == "open" else fcntl
    real = getattr(owner, name)

    def late(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        remove_unfinished(folder)  # the other process
        assert list(tmp_path.iterdir()) == []
        return real(*arguments, **options)

    with new_folder(tmp_path / "first"):
        pass
    monkeypatch.setattr(owner, name, late)
    with new_folder(folder) as new:
        (new / "a").write_text("whole")
        put_in_place(new, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (folder / "a").read_text() == "whole"


def test_a_disk_without_room_for_the_marker_gets_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Any, *_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(OSError, match="No space left on device"), new_folder(tmp_path / "model"):
            pass
    assert list(tmp_path.iterdir()) == []
