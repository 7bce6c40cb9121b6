"""Counts of what a piece of work does that no machine changes: launches, bytes, multiplications, calls of functions.

A launch is an operation of torch that writes memory, or a kernel of Triton: each is one on an accelerator. Bytes are
those of all tensors that a launch is given or returns. A wait is a number that the host reads from the device.
``assert_at_most`` is the gate: a count that grows fails.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

import rlcore
from rlcore._torch_private import TorchDispatchMode, schema_of, tree_leaves

OWN = str(Path(rlcore.__file__).parent)
_FREE = {
    "_record_function_enter_new",
    "_record_function_exit",
    "device",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
}
"""They launch nothing."""


_FACTORS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
"""Names of products -> position of the first of their two factors."""


class Counts(TorchDispatchMode):
    """Counts all operations of torch inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        """By the name of the operation or kernel."""
        self.order: list[str] = []
        """The same names as they came."""
        self.bytes = 0
        self.flops = 0
        self.calls: Counter[str] = Counter()
        """Calls of functions of rlcore by their names, where ``counting_calls`` is entered."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (name in _FREE or _is_view(func)):
            self.add(name, [args, kwargs, found], _flops(name, args))
        return found

    def add(self, name: str, tensors: Any, flops: int = 0) -> None:
        self.launches[name] += 1
        self.order.append(name)
        self.flops += flops
        # Distinct memory, once: an in-place operation returns what it was given.
        self.bytes += sum({_place(x): x.nbytes for x in tree_leaves(tensors) if isinstance(x, Tensor)}.values())

    @contextmanager
    def counting_calls(self) -> Iterator[None]:
        """Count the calls of functions in files of rlcore.

        Comprehensions are none, as from Python 3.12 on, nor is what this class itself calls. No garbage is collected
        meanwhile: the ends of objects of earlier tests may call functions, too.
        """

        def seen(frame: FrameType, event: str, argument: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(OWN) and not code.co_name.startswith(("<", "schema_of")):
                self.calls[code.co_qualname] += 1

        before = sys.getprofile()
        gc.collect()
        gc.disable()
        sys.setprofile(seen)
        try:
            yield
        finally:
            sys.setprofile(before)
            gc.enable()

    def totals(self) -> dict[str, int]:
        return {
            "launches": self.launches.total(),
            "waits": self.launches["_local_scalar_dense"],
            "bytes": self.bytes,
            "flops": self.flops,
            "calls": self.calls.total(),
        }


def _flops(name: str, args: Any) -> int:
    if name not in _FACTORS:
        return 0
    one, other = args[_FACTORS[name] :][:2]
    return 2 * int(one.numel()) * int(other.shape[-1])


def _place(x: Tensor) -> Any:
    return x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape)


def _is_view(func: Any) -> bool:
    returns = schema_of(func).returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def assert_at_most(counts: Counts, **limits: int) -> None:
    """Fail with the largest counts by name if any total is above its limit."""
    totals = counts.totals()
    grown = {name: (totals[name], most) for name, most in limits.items() if totals[name] > most}
    assert not grown, (
        f"this work costs more than it did, (now, at most): {grown}.\nlaunches: {counts.launches.most_common(25)}\n"
        f"calls: {counts.calls.most_common(25)}"
    )
