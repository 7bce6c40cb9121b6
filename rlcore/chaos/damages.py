"""Damage to a checkpoint: each function changes the files of a folder, so that what is loaded could not be right."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from rlcore.engines.checkpoints.digest import blank, sealed

Damage = Callable[[Path, random.Random], str]
"""Returns what was done, in words."""
_ALGORITHM = "xxh3_128"


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("data-*/*.safetensors"))


def flip_bit(folder: Path, draw: random.Random) -> str:
    file = draw.choice([*_files(folder), folder / "manifest.json"])
    data = bytearray(file.read_bytes())
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    return f"a bit of byte {place} of {file.name}"


def zero_data(folder: Path, draw: random.Random) -> str:
    file = draw.choice([file for file in _files(folder) if file.name.startswith("weights")])
    data = file.read_bytes()
    start = len(data) // 2
    file.write_bytes(data[:start] + bytes(len(data) - start))
    return f"the second half of {file.name} is zeros"


def cut(folder: Path, draw: random.Random) -> str:
    file = draw.choice(_files(folder))
    data = file.read_bytes()
    size = draw.randrange(len(data))
    file.write_bytes(data[:size])
    return f"{file.name} has {size} of {len(data)} bytes"


def lose_file(folder: Path, draw: random.Random) -> str:
    file = draw.choice(_files(folder))
    file.unlink()
    return f"{file.name} is gone"


def swap_files(folder: Path, draw: random.Random) -> str:
    one, other = draw.sample(_files(folder), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return f"{one.name} and {other.name} have changed places"


def older_file(folder: Path, draw: random.Random) -> str:
    """Replace a file by that of the save before, which ``folder``-older has."""
    file = draw.choice([file for file in _files(folder) if not file.name.startswith("rng")])
    (older,) = folder.with_name(f"{folder.name}-older").glob(f"data-*/{file.name}")
    shutil.copy(older, file)
    return f"{file.name} is that of an earlier save"


def foreign_data(folder: Path, draw: random.Random) -> str:
    """Write a manifest with a right digest whose data lie elsewhere."""
    (data,) = folder.with_name(f"{folder.name}-older").glob("data-*")
    _rewrite(folder, data=f"../{data.parent.name}/{data.name}")
    return "the manifest's data are outside its folder"


def lack_group(folder: Path, draw: random.Random) -> str:
    """Write a manifest with a right digest that lacks a group of files."""
    lacking = draw.choice(["optimizer", "weights"])
    groups = [group for group in _manifest(folder)["groups"] if group != lacking]
    _rewrite(folder, groups=groups)
    return f"the manifest does not have the group {lacking}"


def _manifest(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((folder / "manifest.json").read_bytes())
    return found


def _rewrite(folder: Path, **changed: object) -> None:
    manifest = _manifest(folder) | changed | {"seal": blank(_ALGORITHM)}
    (folder / "manifest.json").write_bytes(sealed(json.dumps(manifest).encode(), _ALGORITHM))


DAMAGES: dict[str, Damage] = {
    "flipped_bit": flip_bit,
    "zeroed_data": zero_data,
    "cut_file": cut,
    "lost_file": lose_file,
    "swapped_files": swap_files,
    "older_file": older_file,
    "foreign_data": foreign_data,
    "lacking_group": lack_group,
}
