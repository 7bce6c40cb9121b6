"""The predicates of implementations in Triton: the reason why one cannot serve a query, or None."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

from rlcore.kernels.dispatch import Query
from rlcore.kernels.triton_programs import limits
from rlcore.registry import specs_of

_TILED_ARCH = 90
_NOT_INSTALLED = "the package 'triton' is not installed; run: pip install triton"
_FLOAT8_ARCH = 89
_SPLIT = "it needs the whole vocabulary on one rank; gather it and leave out group="
_TILED_LACKS = {
    "softcap": "it has no softcap",
    "row_stats": "its logits stay in the tiles of the product, and it computes no row_stats of them",
}


def rows_refusal(query: Query) -> str | None:
    """Judge an implementation whose softmax is ``triton_rows``."""
    if query.dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    if "group" in query.options:
        return _SPLIT
    return _absence(query)


def copies_refusal(query: Query) -> str | None:
    """Judge copies, which compute nothing."""
    return _needs_threads(query) or _absence(query)


def scans_refusal(query: Query) -> str | None:
    """Judge an implementation that looks for the ends of sequences token by token."""
    return _needs_threads(query) or rows_refusal(query)


def groups_refusal(query: Query) -> str | None:
    """Judge an implementation whose programs take some groups of one size, one after the other."""
    if "irregular" in query.options:
        return "its groups are rows of one length, and group= was given"
    if "long" in query.options:
        return "a group of so many rewards is too long for one program"
    if "reinforce++" in query.options:
        return "it sees one group at a time, and the whitening is over all"
    found = limits(query.device_type)
    if found is not None and not found.has_float64:
        return f"it sums in float64, which programs of {query.device_type!r} do not have"
    return rows_refusal(query)


def tiled_refusal(query: Query) -> str | None:
    """Judge an implementation whose products are ``triton_tiles``."""
    if query.dtype != torch.bfloat16:
        return f"it multiplies bfloat16 alone, and the inputs are {str(query.dtype).removeprefix('torch.')}"
    if query.hidden_size % 8:
        return f"its copy engine needs rows of a multiple of 16 bytes, and H = {query.hidden_size} is no multiple of 8"
    for option, lacking in _TILED_LACKS.items():
        if option in query.options:
            return lacking
    if reason := rows_refusal(query):
        return reason
    if query.planned is None and _interprets():
        return "Triton's interpreter gets products of bfloat16 wrong"
    arch = _target().arch if query.planned is None else query.planned.arch
    return None if arch == _TILED_ARCH else f"its tiles were laid out for architecture {_TILED_ARCH}, not {arch}"


def float8_refusal(query: Query) -> str | None:
    """Judge a copy that quantises to float8 by the device's own conversion."""
    if reason := copies_refusal(query):
        return reason
    if _interprets():
        return None
    arch = _target().arch
    has_float8 = isinstance(arch, int) and arch >= _FLOAT8_ARCH
    return None if has_float8 else f"architecture {arch} converts no float8"


def _needs_threads(query: Query) -> str | None:
    if limits(query.device_type) is None:
        return None
    return f"each of its threads reads an address of its own, and programs of {query.device_type!r} work on whole tiles"


def _absence(query: Query) -> str | None:
    """Return why no kernel can be built for the device of the query, or None."""
    if query.planned is None:
        return _absence_here(query.device_type)
    if importlib.util.find_spec("triton") is None:
        return _NOT_INSTALLED
    return None if query.planned.arch else f"triton builds nothing for the {query.device_type!r} that is planned"


@functools.cache
def _absence_here(device_type: str) -> str | None:
    """Return why no kernel can be built for ``device_type``, or None. TRITON_INTERPRET=1 runs them on the CPU."""
    if importlib.util.find_spec("triton") is None:
        return _NOT_INSTALLED
    if _interprets():
        is_host = any(spec.is_host for spec in specs_of(device_type))
        return None if is_host else "TRITON_INTERPRET=1 interprets kernels on the host's memory alone"
    found = _driver_device_type()
    if found != device_type:
        return f"triton builds for {found or 'no device here'}, not for {device_type!r}"
    if limits(device_type) is not None:  # its tiles are cut to them
        return None
    lanes, declared = _target().warp_size, sorted({n for spec in specs_of(device_type) for n in spec.warp_lanes})
    if lanes in declared:
        return None
    named = " or ".join(map(str, declared))
    return f"its tiles are laid out for warps of {named} lanes, as warp_lanes of the device says, not {lanes}"


def _interprets() -> bool:
    import triton

    if not hasattr(triton, "knobs"):  # before 3.4, of which some vendors' builds are
        return os.environ.get("TRITON_INTERPRET") == "1"
    return bool(triton.knobs.runtime.interpret)


def _driver_device_type() -> str | None:
    from triton.runtime import driver

    try:
        module: str = driver.active.get_device_interface().__name__  # torch.cuda, or the vendor's own
    except RuntimeError:  # "0 active drivers"
        return None
    return module.rpartition(".")[2]


def _target() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_target()
