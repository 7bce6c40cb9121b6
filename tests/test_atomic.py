"""A file is replaced whole, and nothing but a file is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlcore.atomic import write_file


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("before")
    link = tmp_path / "link"
    link.symlink_to("target")
    write_file(link, b"after")
    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="a device or a pipe is not replaced by a file"):
        write_file(pipe, b"data")
    assert pipe.is_fifo()
