"""The folder in which processes of this user keep the files that live as long as they do.

Files of it say which processes to end and where to connect, so it is trusted only as far as nobody else can write it.
It is opened once, without following a link, and checked by its descriptor. Its files are then reached through that
descriptor: whatever becomes of the path meanwhile, they are those of the folder that was checked.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from rlcore.errors import StateError
from rlcore.settings import Settings

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a writer would be waited for
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class RuntimeFolder:
    """The open runtime folder. Names are those of its entries, without a folder in front."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls) -> RuntimeFolder:
        """Open ``Settings.runtime``, made if needed, for this user alone; close it after use.

        Raises:
            StateError: it cannot be made, is a link, belongs to another user, or is open to others.
        """
        return cls.open_at(Settings.from_env().runtime, "RLCORE_RUNTIME")

    @classmethod
    def open_at(cls, path: Path, variable: str) -> RuntimeFolder:
        """Open another folder that is trusted as far; ``variable`` is the setting that errors tell to change."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            descriptor = os.open(path, _FOLDER)
        except OSError as error:
            what = "is a link or a file" if path.is_symlink() or path.is_file() else f"cannot be made: {error}"
            raise StateError(f"the folder {path} {what}; set {variable} to another one") from error
        if why := _why_not_trusted(os.fstat(descriptor), path, variable):
            os.close(descriptor)
            raise StateError(why)
        return cls(path, descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def names(self, pattern: str = "*") -> list[str]:
        """Return the names of the entries that match a pattern of the shell."""
        return fnmatch.filter(os.listdir(self._descriptor), pattern)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None where there is no regular file of this user."""
        try:
            descriptor = os.open(name, _READ, dir_fd=self._descriptor)
        except OSError:  # it is not there, or is a link
            return None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                return None
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which this user alone can read. Raises OSError where the name is a link's."""
        with os.fdopen(os.open(name, _WRITE, 0o600, dir_fd=self._descriptor), "wb") as file:
            file.write(data)

    def modified_s(self, name: str) -> float:
        """Return when an entry was last written, in seconds; 0 if it has gone."""
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return 0.0

    def make_folder(self, name: str) -> Path:
        """Make a folder for this user alone; return its path."""
        os.mkdir(name, 0o700, dir_fd=self._descriptor)
        return self.path / name

    def remove(self, name: str) -> None:
        """Remove an entry of whatever kind, a folder with all that it holds; there may be none."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            shutil.rmtree(name, ignore_errors=True, dir_fd=self._descriptor)

    def limit_to_owner(self, name: str) -> None:
        """Give a socket the mode 0600."""
        os.chmod(name, 0o600, dir_fd=self._descriptor)

    def address(self, name: str) -> str:
        """Return an address that ``bind`` and ``connect`` take for a socket here, valid while the folder is open."""
        return f"/proc/self/fd/{self._descriptor}/{name}"


@contextlib.contextmanager
def runtime_folder() -> Iterator[RuntimeFolder]:
    """Open the runtime folder for the block. Raises as ``RuntimeFolder.open`` does."""
    folder = RuntimeFolder.open()
    try:
        yield folder
    finally:
        folder.close()


def _why_not_trusted(found: os.stat_result, path: Path, variable: str) -> str:
    if found.st_uid != os.getuid():  # anybody can make a folder of that name in /tmp
        return f"the folder {path} belongs to another user; set {variable} to one of your own"
    if found.st_mode & _OTHERS:
        return (
            f"the folder {path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}), who may have put "
            f"files there; set {variable} to a folder for rlcore alone. If this is one, remove what is not yours and "
            f"run: chmod 700 {path}"
        )
    return ""
