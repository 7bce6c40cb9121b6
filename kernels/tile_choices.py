"""The tiles of Triton's kernels: the usual ones, or those that ``rlcore tune`` found faster on this device.

A choice is kept in ``RLCORE_CACHE/tiles``, in a file of the device's name, for one version of Triton and of rlcore. It
is read once a process. A file that is damaged, of other versions, or that names a tile that is no candidate counts as
none: it can make kernels slower, and never wrong.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from rlcore import __version__
from rlcore.atomic import write_file
from rlcore.errors import RlcoreError
from rlcore.registry import get_device, specs_of
from rlcore.settings import Settings

_log = logging.getLogger(__name__)

Tile = Mapping[str, int]

CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "statistics of rows": (
        {"LANES": 512, "num_warps": 8},
        {"LANES": 1024, "num_warps": 16},
        {"LANES": 1024, "num_warps": 8},
        {"LANES": 256, "num_warps": 8},
        {"LANES": 256, "num_warps": 4},
    ),
    "gradient of rows": (
        {"BLOCK": 2048, "num_warps": 2},
        {"BLOCK": 1024, "num_warps": 2},
        {"BLOCK": 1024, "num_warps": 4},
        {"BLOCK": 2048, "num_warps": 4},
        {"BLOCK": 4096, "num_warps": 8},
    ),
    "product of tiles": ({"GROUP": 16}, {"GROUP": 8}, {"GROUP": 32}),
}
"""The first of each is the usual one: the fastest, or as fast as any, on an H100 and an H200 (docs/performance.md)."""


class TunedTiles(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file."""

    device: str
    triton: str
    rlcore: str
    tiles: dict[str, dict[str, int]]
    milliseconds: dict[str, dict[str, float]]
    """The time of every candidate, by its text."""


_tried: dict[str, Tile] = {}
"""The tiles inside ``trying``."""


def tile(name: str, device_type: str) -> Tile:
    """Return the tile of a family of kernels on the devices of a type of torch."""
    return _tried[name] if name in _tried else _kept(name, device_type)


@contextmanager
def trying(name: str, candidate: Tile) -> Iterator[None]:
    """Run the kernels of one family with another tile."""
    _tried[name] = candidate
    try:
        yield
    finally:
        del _tried[name]


@functools.cache
def _kept(name: str, device_type: str) -> Tile:
    usual, *_ = CANDIDATES[name]
    spec = next(iter(specs_of(device_type)), None)
    if spec is None or spec.is_host:
        return usual
    try:
        found = tuned(get_device(spec.name).properties().name)
    except RlcoreError:  # a device that is not there is compiled for
        return usual
    return usual if found is None else found.tiles.get(name, usual)


def tuned(device_name: str) -> TunedTiles | None:
    """Return what ``rlcore tune`` kept for devices of this name; None if that is nothing valid."""
    path = path_of(device_name)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=TunedTiles)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("%s is not used: %s; run rlcore tune again, or remove it", path, error)
        return None
    if (found.device, found.triton, found.rlcore) != identity(device_name):
        return None
    wrong = [name for name, chosen in found.tiles.items() if chosen not in CANDIDATES.get(name, ())]
    if wrong:
        _log.warning("%s is not used: it names tiles of %s that are no candidates", path, ", ".join(wrong))
        return None
    return found


def identity(device_name: str) -> tuple[str, str, str]:
    """Return what a choice is valid for."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    return device_name, triton, __version__


def keep(found: TunedTiles) -> Path:
    """Write the file; return its path."""
    path = path_of(found.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, msgspec.json.format(msgspec.json.encode(found), indent=1))
    _kept.cache_clear()
    return path


def path_of(device_name: str) -> Path:
    safe = "".join(letter if letter.isalnum() else "-" for letter in device_name)
    return Settings.from_env().cache / "tiles" / f"{safe}.json"
