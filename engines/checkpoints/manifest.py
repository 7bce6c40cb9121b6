"""The manifest, which makes a folder a checkpoint: it names the data, and holds the plain state and its own digest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from rlcore.atomic import remove_unfinished, write_file
from rlcore.engines.checkpoints.damage import DamageError, damage_of
from rlcore.engines.checkpoints.digest import ALGORITHMS, blank, is_sealed, sealed
from rlcore.engines.checkpoints.tensor_file import Stamp
from rlcore.errors import CheckpointError

SCHEMA = "rlcore.checkpoint/4"
WITHOUT_DIGESTS = "rlcore.checkpoint/3"
NAME = "manifest.json"
_DATA = re.compile(r"data-[0-9a-f]{12}")
_GROUP = re.compile(r"[a-z]{1,32}")


class CheckpointManifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema: str
    seal: str = ""
    """The digest of this file, of the text in which this is all zeros."""
    algorithm: str = ""
    """The algorithm of all digests."""
    data: str
    """The name of the folder that has the files: "data-" and the id of the save."""
    groups: list[str]
    """The start of the files' names, such as "weights"."""
    num_parts: int
    """Files of each group."""
    state: dict[str, Any]
    """The plain values: step, version, optimizer hyper-parameters, schedulers, the user's own."""

    @property
    def stamp(self) -> Stamp | None:
        """The stamp that every file must have; None for a checkpoint without digests."""
        return Stamp(self.data.removeprefix("data-"), self.algorithm) if self.schema == SCHEMA else None

    def files(self, folder: Path) -> dict[str, list[Path]]:
        """Return the files by group, each in the order of the ranks that wrote them."""
        return {
            group: [folder / self.data / f"{group}-{rank}.safetensors" for rank in range(self.num_parts)]
            for group in self.groups
        }


class _Schema(msgspec.Struct):
    schema: str = ""


def encode_manifest(stamp: Stamp, groups: list[str], num_parts: int, state: dict[str, Any]) -> bytes:
    manifest = CheckpointManifest(
        schema=SCHEMA,
        seal=blank(stamp.algorithm),
        algorithm=stamp.algorithm,
        data=f"data-{stamp.save}",
        groups=groups,
        num_parts=num_parts,
        state=state,
    )
    return sealed(msgspec.json.format(msgspec.json.encode(manifest)), stamp.algorithm)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read and check the manifest; none of its paths leaves the folder.

    Raises:
        DamageError: it is not what was written.
        CheckpointError: it is of a format that is not read here.
        FileNotFoundError: there is none.
    """
    path = folder / NAME
    with damage_of(path):
        text = path.read_bytes()
        schema = msgspec.json.decode(text, type=_Schema).schema
        if schema not in (SCHEMA, WITHOUT_DIGESTS):
            raise CheckpointError(
                f"{path} has the format {schema!r:.50}; this rlcore reads {SCHEMA!r} and {WITHOUT_DIGESTS!r}; "
                "use another checkpoint, or the rlcore that wrote this one"
            )
        manifest = msgspec.json.decode(text, type=CheckpointManifest)
        _check(manifest, path)
        if manifest.stamp is not None and not _has_seal(manifest, text):
            raise DamageError(path, "it differs from the digest in it")
    return manifest


def _has_seal(manifest: CheckpointManifest, text: bytes) -> bool:
    return manifest.algorithm in ALGORITHMS and is_sealed(text, manifest.seal, manifest.algorithm)


def _check(manifest: CheckpointManifest, path: Path) -> None:
    if not _DATA.fullmatch(manifest.data):
        raise DamageError(path, f"its data must be a folder data-<12 hexadecimal digits>, not {manifest.data!r}")
    if wrong := [group for group in manifest.groups if not _GROUP.fullmatch(group)]:
        raise DamageError(path, f"its groups must be words of 1 to 32 letters a to z, not {wrong[0]!r:.50}")
    if manifest.num_parts < 1:
        raise DamageError(path, f"its num_parts must be at least 1, not {manifest.num_parts}")


def write_manifest(folder: Path, text: bytes) -> None:
    write_file(folder / NAME, text)


def remove_unfinished_manifests(folder: Path) -> None:
    """Remove what saves have left that were killed as they wrote the manifest."""
    remove_unfinished(folder / NAME)


def committed(folder: Path) -> str:
    """Return the name of the data folder of the last complete checkpoint, "" if there is none that can be read."""
    try:
        return read_manifest(folder).data
    except (FileNotFoundError, DamageError, CheckpointError):
        return ""


def check_replaceable(folder: Path) -> None:
    """Raise CheckpointError if the folder has a manifest that no rlcore wrote."""
    path = folder / NAME
    try:
        with damage_of(path):
            schema = msgspec.json.decode(path.read_bytes(), type=_Schema).schema
    except FileNotFoundError:
        return
    except DamageError as error:
        if isinstance(error.__cause__, NotADirectoryError):  # what a save says of that is better
            return
        schema, why = "", error.why
    else:
        why = f"its schema is {schema!r}"
    if not schema.startswith("rlcore.checkpoint/"):
        raise CheckpointError(
            f"{path} is not a manifest that rlcore wrote ({why}), and is not replaced; "
            "save to another folder, or move the file away"
        )
