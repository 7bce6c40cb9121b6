"""The command ``rlcore tune``: the fastest tiles of Triton's kernels on this device, kept for later programs."""

from __future__ import annotations

import sys

import msgspec

from rlcore.cli.console import AsJson, DeviceName, print_json, print_table
from rlcore.torch_import import import_torch


def tune(device: DeviceName = None, as_json: AsJson = False) -> None:
    """Time tiles of Triton's kernels, each checked against float64, and keep the best of each family.

    Later programs of this user on such devices use them, and records of `rlcore bench` name them.
    """
    import_torch()
    from rlcore.kernels.tile_choices import keep
    from rlcore.kernels.tuning import tune as search
    from rlcore.registry import get_device

    found = search(get_device(device))
    path = keep(found)
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    rows = [
        [name, text, f"{took:.4f}", "chosen" if text == str(found.tiles[name]) else ""]
        for name, times in found.milliseconds.items()
        for text, took in times.items()
    ]
    print_table(["kernels", "tile", "ms", ""], rows)
    print(path, file=sys.stderr)
