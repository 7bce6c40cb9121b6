"""The report on a folder that a save or an export wrote: its files, and what is not as it was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.engines.checkpoints import export_record, manifest
from rlcore.engines.checkpoints.damage import DamageError, damage_of
from rlcore.engines.checkpoints.manifest import CheckpointManifest
from rlcore.engines.checkpoints.saved_tensor import open_parts
from rlcore.engines.checkpoints.tensor_file import TensorFile
from rlcore.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """The report on one file."""

    file: str
    """Its path in the folder."""
    tensors: int
    """0 for a file without tensors, and for one that cannot be read."""
    bytes: int
    """The bytes of the file; 0 if it is not there."""
    error: str
    """"" if it is as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The report on a folder that a save or an export wrote."""

    folder: str
    format: str
    save: str
    """The id of the save or export."""
    digest: str
    """The algorithm of the digests; "" if there are none."""
    files: list[FileReport]
    errors: list[str]
    """Damage beyond single files: parts of tensors that do not fit together."""
    state: dict[str, Any] = field(default_factory=dict)
    """The plain values of a checkpoint; yours are in ``extra``."""

    @property
    def is_whole(self) -> bool:
        return not self.errors and not any(file.error for file in self.files)


def verify(folder: Path) -> VerifyReport:
    """Read all of a checkpoint or an exported model and compare it with its digests; no engine is needed.

    A checkpoint that a save replaces meanwhile is left for the new one.

    Raises:
        CheckpointError: the folder is neither, or the file that lists the others is damaged.
    """
    while True:
        last = manifest.committed(folder)
        try:
            report = _report(folder)
        except CheckpointError:
            if manifest.committed(folder) == last:
                raise
            continue
        if report.is_whole or manifest.committed(folder) == last:
            return report


def _report(folder: Path) -> VerifyReport:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; give the one that save() or export() wrote")
    try:
        if _exists(folder / manifest.NAME):
            return _of_checkpoint(folder, manifest.read_manifest(folder))
        return _of_export(folder, export_record.read_record(folder))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is neither a checkpoint (no {manifest.NAME}) nor an export of rlcore (no {export_record.NAME})"
        ) from error
    except DamageError as error:
        raise CheckpointError(f"{folder} is damaged: {error}") from error


def _exists(path: Path) -> bool:
    with damage_of(path):
        return path.exists()


def _of_checkpoint(folder: Path, found: CheckpointManifest) -> VerifyReport:
    def check(file: Path) -> None:
        header = TensorFile(file)
        if found.stamp is not None:
            header.check_origin(found.stamp)
        header.check_data()

    groups = found.files(folder)
    files = [_checked(folder, file, check) for files in groups.values() for file in files]
    is_readable = not any(file.error for file in files)
    return VerifyReport(
        folder=str(folder),
        format=found.schema,
        save=found.data.removeprefix("data-"),
        digest=found.algorithm,
        files=files,
        errors=[error for group in groups.values() if is_readable and (error := _unfitting(group, found))],
        state=found.state,
    )


def _unfitting(files: Sequence[Path], found: CheckpointManifest) -> str:
    try:
        open_parts(files, found.stamp)
    except DamageError as error:
        return str(error)
    return ""


def _of_export(folder: Path, record: export_record.ExportRecord) -> VerifyReport:
    def check(file: Path) -> None:
        record.check_file(folder, str(file.relative_to(folder)))

    names = [*record.weights, *record.others]
    return VerifyReport(
        folder=str(folder),
        format=record.schema,
        save=record.save,
        digest=record.algorithm,
        files=[_checked(folder, folder / name, check) for name in names],
        errors=[],
    )


def _checked(folder: Path, file: Path, check: Callable[[Path], None]) -> FileReport:
    error = ""
    try:
        check(file)
    except FileNotFoundError:
        error = "it is not there"
    except DamageError as damage:
        error = damage.why
    return FileReport(
        file=str(file.relative_to(folder)),
        tensors=_num_tensors(file) if file.suffix == ".safetensors" else 0,
        bytes=file.stat().st_size if file.exists() else 0,
        error=error,
    )


def _num_tensors(file: Path) -> int:
    try:
        return len(TensorFile(file).entries)
    except (DamageError, FileNotFoundError):
        return 0
