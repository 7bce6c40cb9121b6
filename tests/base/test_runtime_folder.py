"""The runtime folder is this user's alone, and nothing in it is believed that another user could have put there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.engines.launchers.running import announce, kill, running_processes
from rlcore.engines.launchers.runtime_files import record_name
from rlcore.errors import InvalidInputError, StateError
from rlcore.process.guard import FAMILY
from rlcore.process.runtime_folder import RuntimeFolder, runtime_folder
from rlcore.process.status import start_time

ANOTHER_USER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("RLCORE_RUNTIME", str(path))
    return path


@pytest.fixture
def folder(path: Path) -> Iterator[RuntimeFolder]:
    with runtime_folder() as folder:
        yield folder


def waiting(environment: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that waits, with the environment already that /proc shows: amid execve it shows none."""
    command = ["/bin/sh", "-c", "echo; read line"]
    process = subprocess.Popen(
        command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options
    )
    assert process.stdout is not None and process.stdout.read(1) == b"\n"
    return process


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process started as a worker of this process is, of which only the device and the engines are missing."""
    with waiting({FAMILY: f"{os.getpid()}-0a1b"}, start_new_session=True) as process:
        yield process
        process.kill()


# ------------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o755, 0o704])
def test_a_folder_that_is_open_to_others_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    words = (
        rf"^the folder {path} is open to other users \(mode {mode:04o}\).*; set RLCORE_RUNTIME to a folder for rlcore "
    )
    words += rf"alone\. If this is one, .* run: chmod 700 {path}$"
    with pytest.raises(StateError, match=words):
        running_processes()
    path.chmod(0o700)
    assert running_processes() == []


@pytest.mark.parametrize("owner", [os.geteuid(), pytest.param(ANOTHER_USER, marks=as_root)])
def test_a_link_is_not_followed(path: Path, monkeypatch: pytest.MonkeyPatch, owner: int) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    os.chown(link, owner, -1, follow_symlinks=False)
    monkeypatch.setenv("RLCORE_RUNTIME", str(link))
    with pytest.raises(StateError, match=rf"^the folder {link} is a link or a file; set RLCORE_RUNTIME to another"):
        running_processes()


@as_root
def test_a_folder_of_another_user_is_refused(path: Path) -> None:
    os.chown(path, ANOTHER_USER, -1)
    with pytest.raises(StateError, match=rf"^the folder {path} belongs to another user; set RLCORE_RUNTIME"):
        running_processes()


def test_files_are_those_of_the_folder_that_was_checked(path: Path, folder: RuntimeFolder) -> None:
    folder.write("note", b"ours")
    path.rename(path.with_name("moved"))
    path.mkdir()
    (path / "note").write_text("theirs")
    assert folder.read("note") == b"ours"
    folder.remove("note")
    assert folder.names() == []
    assert (path / "note").read_text() == "theirs"


def test_a_new_folder_is_closed_to_others_whatever_the_umask(path: Path) -> None:
    path.rmdir()
    before = os.umask(0)
    try:
        with runtime_folder() as folder:
            folder.write("note", b"")
            folder.make_folder("store")
    finally:
        os.umask(before)
    modes = [entry.stat().st_mode & 0o777 for entry in (path, path / "note", path / "store")]
    assert modes == [0o700, 0o600, 0o700]


def test_links_and_pipes_in_the_folder_are_neither_read_nor_written(path: Path, folder: RuntimeFolder) -> None:
    (path.parent / "secret").write_text("kept")
    (path / "link").symlink_to(path.parent / "secret")
    os.mkfifo(path / "pipe")
    assert (folder.read("link"), folder.read("pipe")) == (None, None)
    with pytest.raises(OSError, match="symbolic link"):
        folder.write("link", b"lost")
    folder.remove("link")
    assert (path.parent / "secret").read_text() == "kept"


# ------------------------------------------------------------------------------------------ records of workers


def test_a_worker_is_listed_and_ended(folder: RuntimeFolder, worker: subprocess.Popen[bytes]) -> None:
    announce(folder, worker.pid, "cpu:0", ["an engine"])
    assert [process.pid for process in running_processes()] == [worker.pid]
    assert kill(worker.pid).device == "cpu:0"
    assert worker.wait(60) == -9


@as_root
def test_a_record_of_another_user_is_not_believed(
    path: Path, folder: RuntimeFolder, worker: subprocess.Popen[bytes]
) -> None:
    announce(folder, worker.pid, "\x1b[2J", ["an engine"])
    os.chown(path / record_name(worker.pid), ANOTHER_USER, -1)
    assert running_processes() == []
    with pytest.raises(InvalidInputError, match=f"^no worker process has the id {worker.pid}; living: none$"):
        kill(worker.pid)
    assert worker.poll() is None


@pytest.mark.parametrize("fault", ["no worker", "of another parent", "started by a worker", "under another name"])
def test_a_record_of_a_process_that_is_no_worker_ends_nothing(path: Path, folder: RuntimeFolder, fault: str) -> None:
    family = {"no worker": "", "of another parent": f"{os.getpid() + 1}-0a1b"}.get(fault, f"{os.getpid()}-0a1b")
    with waiting({FAMILY: family}, start_new_session=fault != "started by a worker") as process:
        try:
            announce(folder, process.pid, "cpu:0", [])
            if fault == "under another name":
                (path / record_name(process.pid)).rename(path / record_name(1))
            with pytest.raises(InvalidInputError, match=f"^no worker process has the id {process.pid}; living: none$"):
                kill(process.pid)
            assert process.poll() is None
        finally:
            process.kill()


@as_root
def test_a_process_of_another_user_is_not_ended(folder: RuntimeFolder) -> None:
    environment = {FAMILY: f"{os.getpid()}-0a1b"}
    with waiting(environment, start_new_session=True, user=ANOTHER_USER) as process:
        try:
            announce(folder, process.pid, "cpu:0", [])
            with pytest.raises(InvalidInputError, match="no worker process has the id"):
                kill(process.pid)
            assert process.poll() is None
        finally:
            process.kill()


def test_a_process_with_the_id_of_an_earlier_one_is_not_ended(
    path: Path, folder: RuntimeFolder, worker: subprocess.Popen[bytes]
) -> None:
    announce(folder, worker.pid, "cpu:0", [])
    record = path / record_name(worker.pid)
    started = start_time(worker.pid)
    assert started is not None
    record.write_text(json.dumps(json.loads(record.read_text()) | {"started": started - 1}))
    with pytest.raises(InvalidInputError, match="no worker process has the id"):
        kill(worker.pid)
    assert worker.poll() is None and not record.exists()
