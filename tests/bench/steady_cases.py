"""Work of milliseconds on one thread of a host or on a GPU, some of it slowed on demand: for a process of its own.

``python steady_cases.py 0.1`` plants a slowdown of 10 %: that much more of the same work. On the host each is a case,
on a GPU all are contenders of one case, for a process takes a second to get at a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Work, expect

PLANTED = "steady/product_256"
PLANTED_ON_GPU = {"add", "products"}
_TIMES = 40
_GPU_NUMEL, _GPU_SIDE, _GPU_PRODUCTS = 1 << 28, 8192, 400


def _case(name: str, make: Callable[[], Callable[[], Tensor]], slowdown: float) -> Case:
    count = _TIMES + round(_TIMES * slowdown)

    def prepare(device: Any) -> Work:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        work = make()

        def run() -> Tensor:
            for _ in range(count):
                output = work()
            return output

        def check(output: Tensor) -> None:
            expect(bool(output.isfinite().all()), "not finite")

        return Work(contenders=(Contender(implementation="torch", run=run, check=check),), params={})

    return Case(name=name, description="", prepare=prepare, timeout_s=60.0)


def _product(size: int) -> Callable[[], Callable[[], Tensor]]:
    def make() -> Callable[[], Tensor]:
        a, b = torch.randn(size, size), torch.randn(size, size)
        return lambda: a @ b

    return make


def _on(size: int, operation: Callable[[Tensor], Tensor]) -> Callable[[], Callable[[], Tensor]]:
    def make() -> Callable[[], Tensor]:
        values = torch.rand(size, 1024) + 0.1
        return lambda: operation(values)

    return make


_WORK = {
    "product_64": _product(64),
    "product_256": _product(256),
    "product_320": _product(320),
    "exp": _on(64, torch.exp),
    "softmax": _on(64, lambda x: x.softmax(1)),
    "sum": _on(256, lambda x: x.sum(1)),
    "sort": _on(4, lambda x: x.sort(1).values),
    "add": _on(128, lambda x: x + x),
    "gelu": _on(32, torch.nn.functional.gelu),
    "layer_norm": _on(64, lambda x: torch.nn.functional.layer_norm(x, (1024,))),
}


def gpu_case(slowdown: float = 0.0) -> Case:
    """Each runs for one or two milliseconds on an H200; what is planted has that much more to work on."""

    def prepare(device: Any) -> Work:
        torch.manual_seed(0)
        numel, count = (round(size * (1 + slowdown)) for size in (2.5 * _GPU_NUMEL, _GPU_PRODUCTS))
        more, products = _on_gpu(device, numel), _on_gpu(device, count, 1024, 1024).bfloat16()
        values = _on_gpu(device, _GPU_NUMEL // _GPU_SIDE, _GPU_SIDE)
        square = _on_gpu(device, _GPU_SIDE, _GPU_SIDE).bfloat16()
        work: dict[str, Callable[[], Tensor]] = {
            "add": lambda: more.add_(1.0),
            "products": lambda: products @ products,
            "product": lambda: square @ square,
            "exp": values.exp,
            "softmax": lambda: values.softmax(1),
            "sum": lambda: values.sum(1),
            "cumsum": lambda: values.cumsum(1),
            "gelu": lambda: torch.nn.functional.gelu(values),
            "layer_norm": lambda: torch.nn.functional.layer_norm(values, (_GPU_SIDE,)),
            "transpose": values.T.contiguous,
        }

        def check(output: Tensor) -> None:
            expect(bool(output.view(-1)[-1].isfinite()), "not finite")

        return Work(
            contenders=tuple(Contender(implementation=name, run=run, check=check) for name, run in work.items()),
            params={},
        )

    return Case(name="steady/gpu", description="", prepare=prepare, timeout_s=60.0)


def _on_gpu(device: Any, *shape: int) -> Tensor:
    return torch.rand(*shape, device=device.torch_device) + 0.1


def cases(slowdown: float = 0.0) -> dict[str, Case]:
    found = (
        _case(f"steady/{name}", make, slowdown if f"steady/{name}" == PLANTED else 0.0) for name, make in _WORK.items()
    )
    return {case.name: case for case in found}


if __name__ == "__main__":
    from rlcore.bench.measurement.isolated import serve

    planted = float(sys.argv[1])
    serve(lambda: cases(planted) | {"steady/gpu": gpu_case(planted)})
