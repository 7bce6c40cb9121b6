"""The file of an exported model folder that names the files of the export, with their digests.

Other files are somebody else's, and a folder with such files is not replaced.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rlcore.atomic import sync_to_disk, write_file
from rlcore.engines.checkpoints.damage import DamageError, damage_of
from rlcore.engines.checkpoints.digest import ALGORITHMS, blank, digest_of, is_sealed, sealed
from rlcore.engines.checkpoints.tensor_file import Stamp, TensorFile
from rlcore.errors import CheckpointError

SCHEMA = "rlcore.export/1"
NAME = "rlcore-export.json"
_SHOWN = 3


class ExportRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema: str
    seal: str
    """Digest of this file, of the text in which this is all zeros."""
    algorithm: str
    """The algorithm of all digests."""
    save: str
    """Id of the export, which stands in the weight files too."""
    weights: list[str]
    """Names of the files with weights, which hold digests of their own."""
    others: dict[str, str]
    """Digest of each other file, by its path in the folder."""

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.save, self.algorithm)

    def check_file(self, folder: Path, name: str) -> None:
        """Compare one of the files with its digests.

        Raises:
            DamageError: it differs, or cannot be read.
            FileNotFoundError: it is not there.
        """
        self.check_origin(folder, name)
        if name in self.weights:
            TensorFile(folder / name).check_data()

    def check_origin(self, folder: Path, name: str) -> None:
        """Raise as ``check_file`` does, unless the export wrote the file; of one with weights, the header."""
        path = folder / name
        if name in self.weights:
            TensorFile(path).check_origin(self.stamp)
            return
        with damage_of(path):
            if digest_of(path.read_bytes(), self.algorithm) != self.others[name]:
                raise DamageError(path, "it differs from its digest")


def write_record(folder: Path, weights: list[str], stamp: Stamp) -> None:
    """Write the record beside the files of a new export, and flush these to disk."""
    others = sorted(name for name in _files(folder) if name not in (*weights, NAME) and (folder / name).is_file())
    for name in others:
        sync_to_disk(folder / name)
    record = ExportRecord(
        schema=SCHEMA,
        seal=blank(stamp.algorithm),
        algorithm=stamp.algorithm,
        save=stamp.save,
        weights=weights,
        others={name: digest_of((folder / name).read_bytes(), stamp.algorithm) for name in others},
    )
    write_file(folder / NAME, sealed(msgspec.json.format(msgspec.json.encode(record)) + b"\n", stamp.algorithm))
    sync_to_disk(folder)


def read_record(folder: Path) -> ExportRecord:
    """Read and check the record.

    Raises:
        DamageError: it is not what was written.
        FileNotFoundError: no export wrote this folder.
    """
    path = folder / NAME
    with damage_of(path):
        text = path.read_bytes()
        record = msgspec.json.decode(text, type=ExportRecord)
        if record.schema != SCHEMA:
            raise DamageError(path, f"its schema is {record.schema!r}; this rlcore reads {SCHEMA!r}")
        if record.algorithm not in ALGORITHMS or not is_sealed(text, record.seal, record.algorithm):
            raise DamageError(path, "it differs from the digest in it")
        if outside := [name for name in (*record.weights, *record.others) if not _is_inside(name)]:
            raise DamageError(path, f"its files must be in its folder, and {outside[0]!r} is not")
    return record


def _is_inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


def check_free(folder: Path) -> None:
    """Raise CheckpointError unless the folder is absent, empty, or holds files as an export wrote them and no other.

    Raises:
        OSError: it is no folder, or cannot be read.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        record = read_record(folder)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not empty, and no export of rlcore wrote it (it has no {NAME}); nothing there was touched. "
            "Export to another folder, or move this one away"
        ) from None
    except DamageError as error:
        raise CheckpointError(
            f"{folder} may hold other files than an export's: {error}; nothing there was touched. "
            "Export to another folder, or move this one away"
        ) from error
    own = {NAME, *record.weights, *record.others}
    foreign = list(itertools.islice((name for name in _files(folder) if name not in own), _SHOWN + 1))
    if foreign:
        shown = ", ".join([*foreign[:_SHOWN], *(["and others"] if len(foreign) > _SHOWN else [])])
        raise CheckpointError(
            f"{folder} has files that no export wrote: {shown}; nothing there was touched. "
            "Move them away, or export to another folder"
        )
    _check_unchanged(folder, record)


def _check_unchanged(folder: Path, record: ExportRecord) -> None:
    """Raise CheckpointError if somebody edited or replaced a file of the export; one that has gone is no loss."""
    for name in (*record.others, *record.weights):
        try:
            record.check_origin(folder, name)
        except FileNotFoundError:
            continue
        except DamageError as error:
            raise CheckpointError(
                f"{folder} has a file that was changed after its export: {error}; nothing there was touched. "
                "Move this folder away, or export to another"
            ) from error


def _files(folder: Path) -> Iterator[str]:
    """Yield the paths of all files, links and empty folders in the folder."""
    for root, folders, files in os.walk(folder, onerror=_refuse):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        is_empty = not (files or folders) and root != str(folder)
        for name in (*files, *links, *((".",) if is_empty else ())):
            yield os.path.normpath(os.path.relpath(os.path.join(root, name), folder))


def _refuse(error: OSError) -> None:
    raise error
