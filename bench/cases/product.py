"""Matrix products: what the device's matrix units give, in a burst and for a minute.

Letters: M rows, N columns, K the inner dimension.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.timing import Measured, self_timed
from rlcore.bench.measurement.calibrate import shortest_s
from rlcore.device import Device
from rlcore.errors import UnsupportedError
from rlcore.tensor_data import dtype_name

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SIZES = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 4096), (4096, 151_936, 4096))
"""M, N, K: three squares, a projection of an 8B model under 8192 tokens, and its output head under 4096."""
_HOST_SIZES = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024))
_SUSTAINED, _HOST_SUSTAINED = (8192, 8192, 8192), (1024, 1024, 1024)
_SUSTAINED_S, _WINDOW_S = 60.0, 10.0
_LONGEST_S = 1.0
"""The longest product of a sweep: a host without units for half precision would take minutes for all of them."""
_CHECKED = 16
"""Rows and columns that are compared with float64."""

Size = tuple[int, int, int]


class _Product:
    def __init__(self, device: Device, size: Size, dtype: torch.dtype) -> None:
        self.M, self.N, self.K = size
        self.dtype = dtype
        at: dict[str, Any] = {"device": device.torch_device}
        self.a_MK = torch.randn(self.M, self.K, **at).to(dtype)
        self.b_KN = torch.randn(self.K, self.N, **at).to(dtype)
        self.out_MN = torch.empty(self.M, self.N, dtype=dtype, **at)

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K

    def run(self) -> Tensor:
        return torch.mm(self.a_MK, self.b_KN, out=self.out_MN)

    def check(self, _: Any) -> None:
        want = self.a_MK[:_CHECKED].double() @ self.b_KN[:, :_CHECKED].double()
        error = float((self.out_MN[:_CHECKED, :_CHECKED].double() - want).abs().max())
        # One rounding of the result; float32 may be computed with the inputs rounded to 10 bits.
        tolerance = 8 * self.K**0.5 * max(torch.finfo(self.dtype).eps, 2**-11)
        expect(error <= tolerance, f"a product differs from float64 by {error:.1e}, more than {tolerance:.1e}")

    @property
    def params(self) -> dict[str, int | float | str]:
        return {"M": self.M, "N": self.N, "K": self.K, "dtype": dtype_name(self.dtype)}


def _prepare_sweep(device: Device) -> Work:
    device.seed(0)
    sizes = _HOST_SIZES if device.spec.is_host else _SIZES
    contenders = []
    for dtype in _DTYPES:
        products = [_Product(device, size, dtype) for size in sizes]
        rate = _rate(device, products[0]) if device.spec.is_host else math.inf
        contenders += [_contender(product, rate) for product in products]
    return Work(tuple(contenders), {}, runs_on="stream")


def _rate(device: Device, product: _Product) -> float:
    """FLOP/s, roughly."""
    return product.flops / shortest_s(device, product.run, budget_s=0.0)


def _contender(product: _Product, rate: float) -> Contender:
    def refuse() -> None:
        raise UnsupportedError(
            f"a product of {product.flops:,} operations in {product.params['dtype']} here",
            f"at the {rate / 1e9:.1f} GFLOP/s of the smallest one it would take {product.flops / rate:.1f} s, and a "
            f"sweep has none of more than {_LONGEST_S:g} s",
        )

    return Contender(
        "torch.mm",
        product.run if product.flops / rate <= _LONGEST_S else refuse,
        product.check,
        params=product.params,
        limits={f"product/{product.params['dtype']}": product.flops},
    )


def _prepare_sustained(device: Device) -> Work:
    device.seed(0)
    is_host = device.spec.is_host
    product = _Product(device, _HOST_SUSTAINED if is_host else _SUSTAINED, torch.float32 if is_host else torch.bfloat16)

    def run() -> Measured:
        ends: list[float] = []
        started = time.perf_counter()
        while not ends or ends[-1] < _SUSTAINED_S:
            product.run()
            device.synchronize()
            ends.append(time.perf_counter() - started)
        return _sustained(ends, product.flops)

    limits = {f"product/{product.params['dtype']}": product.flops}
    params = {**product.params, "seconds": _SUSTAINED_S, "window_s": _WINDOW_S}
    return Work((self_timed("torch.mm", run, product.check, limits=limits),), params, num_runs=1)


def _sustained(ends: list[float], flops: int) -> Measured:
    """Return the rates in the first and the last window of a product that ended at these seconds after the start."""
    durations = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    window = min(_WINDOW_S, ends[-1] / 2)
    windows = {
        "first_window": [spent for spent, end in zip(durations, ends, strict=True) if end <= window] or durations[:1],
        "last_window": [spent for spent, end in zip(durations, ends, strict=True) if end > ends[-1] - window],
    }
    rates = {name: flops * len(spent) / sum(spent) for name, spent in windows.items()}
    quantities = {name: Quantity(rate, "FLOP/s") for name, rate in rates.items()}
    ratio = Quantity(rates["last_window"] / rates["first_window"], "1")
    return Measured(None, statistics.median(durations), {**quantities, "last_of_first": ratio})


cases = (
    Case(
        "product/sweep",
        "matrix products by size and dtype, one at a time",
        _prepare_sweep,
        effort="quick",
        estimate_s=1.0,
        device_estimate_s=13.0,
    ),
    Case(
        "product/sustained",
        "the same product for a minute: the rate of the last ten seconds beside that of the first",
        _prepare_sustained,
        effort="full",
        estimate_s=70.0,
    ),
)
