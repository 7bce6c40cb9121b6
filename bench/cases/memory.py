"""Memory of the device: how fast it is read and written by the plainest kernels there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.device import Device

_BYTES, _HOST_BYTES = 1 << 30, 1 << 27


def _prepare(device: Device) -> Work:
    numel = (_HOST_BYTES if device.spec.is_host else _BYTES) // 4
    source, other = (torch.full((numel,), value, device=device.torch_device) for value in (1.0, 2.0))

    def writing(name: str, passes: int, write: Callable[[Tensor], Any], value: float) -> Contender:
        target = torch.empty_like(source)  # its own: it is checked after the others have run

        def check(_: Any) -> None:
            expect(bool((target == value).all()), f"{name} left something else than {value}")

        return _contender(name, passes * 4 * numel, lambda: write(target), check)

    def check_sum(total: Tensor) -> None:
        # Partial sums above 2 ** 24 are rounded where their sizes are no powers of two.
        expect(abs(float(total) - numel) <= numel * 2**-20, f"ones sum up to {float(total)}, not {numel}")

    return Work(
        (
            writing("copy", 2, lambda target: target.copy_(source), 1.0),
            writing("fill", 1, lambda target: target.fill_(3.0), 3.0),
            writing("triad", 3, lambda target: torch.add(source, other, alpha=2.0, out=target), 5.0),
            _contender("read", 4 * numel, source.sum, check_sum),
        ),
        {"dtype": "float32"},
        runs_on="stream",
    )


def _contender(name: str, nbytes: int, run: Callable[[], Any], check: Callable[[Any], None]) -> Contender:
    return Contender(name, run, check, params={"bytes": nbytes}, limits={"memory": nbytes})


cases = (
    Case(
        "memory/bandwidth",
        "copy, fill, sum and a + 2 b of large arrays in device memory",
        _prepare,
        effort="quick",
        estimate_s=4.0,
    ),
)
