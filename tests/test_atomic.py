"""A file is replaced whole, and nothing but a file is."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from rlcore import atomic
from rlcore.atomic import append_to_file, is_special, remove_unfinished, write_file
from rlcore.file_lock import let_go, take


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("before")
    link = tmp_path / "link"
    link.symlink_to("target")
    write_file(link, b"after")
    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_links_in_a_circle_are_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: '.*one'"):
        write_file(tmp_path / "one", b"")


def test_a_file_is_on_disk_before_it_has_its_name_and_then_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a power failure leaves the earlier content or the new one."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flush(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append("flush the folder" if path.is_dir() else f"flush {path.read_text()}")
        fsync(descriptor)

    def rename(source: str, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    write_file(tmp_path / "file", b"all of it")
    assert done == ["flush all of it", "rename", "flush the folder"]


@pytest.mark.parametrize("before", [None, b"before\n"])
def test_what_a_full_disk_took_of_an_append_is_undone(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    size = len(before or b"")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            append_to_file(path, b"a line that does not fit\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == (before or b"")
    append_to_file(path, b"a line that fits\n")
    assert path.read_bytes() == (before or b"") + b"a line that fits\n"


def test_an_append_to_a_full_device_says_that_it_is_full() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        append_to_file(Path("/dev/full"), b"data")


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="a device or a pipe is not replaced by a file"):
        write_file(pipe, b"data")
    assert pipe.is_fifo()


def test_what_a_killed_writer_left_goes_with_the_next_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "target"
    others = [".target.original", ".target.bak", ".other.rlcore-abcdefgh"]
    for name in others:
        (tmp_path / name).touch()
    child = os.fork()
    if child == 0:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        write_file(path, b"cut short")
    os.waitpid(child, 0)
    assert len(list(tmp_path.glob(".target.rlcore-*"))) == 1
    living = tmp_path / ".target.rlcore-ijklmnop"
    descriptor = os.open(living, os.O_RDWR | os.O_CREAT)
    assert take(descriptor)
    write_file(path, b"whole")
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*others, living.name, "target"])
    let_go(descriptor)
    remove_unfinished(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*others, "target"])


@pytest.mark.parametrize("is_held", [False, True])
def test_a_new_file_that_another_process_takes_for_left_behind_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    path, held = tmp_path / "target", []

    def take_late(descriptor: int) -> bool | None:
        """Lock a file that the other process has removed, and has perhaps not let go yet."""
        if not held:
            (found,) = tmp_path.glob(".target.rlcore-*")
            held.append(os.open(found, os.O_RDWR))
            assert not is_held or take(held[0])
            found.unlink()
        return take(descriptor)

    monkeypatch.setattr(atomic, "take", take_late)
    write_file(path, b"whole")
    let_go(*held)
    assert path.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["target"]


def test_a_file_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, replace = tmp_path / "target", os.replace

    def replace_late(*names: str) -> None:
        remove_unfinished(path)  # by another process
        replace(*names)

    monkeypatch.setattr(os, "replace", replace_late)
    write_file(path, b"whole")
    assert path.read_bytes() == b"whole"


def test_a_file_that_vanishes_under_the_look_is_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of a checkpoint that is being replaced would call it damaged."""
    file, pipe, look = tmp_path / "file", tmp_path / "pipe", Path.stat
    os.mkfifo(pipe)
    assert is_special(pipe) and not is_special(tmp_path)

    def look_and_remove(path: Path, **options: object) -> os.stat_result:
        found = look(path, **options)  # type: ignore[arg-type]
        file.unlink(missing_ok=True)
        return found

    file.touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", look_and_remove)
        assert not is_special(file)
    assert not file.exists() and not is_special(file)
