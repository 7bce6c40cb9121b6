"""Cases that take milliseconds on one thread of a host, and one of them slowed on demand: for a process of their own.

``python steady_cases.py 0.1`` plants a slowdown of 10 %: that much more of the same work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Work, expect

PLANTED = "steady/product_256"
_TIMES = 40


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
    "product_128": _product(128),
    "product_192": _product(192),
    "product_256": _product(256),
    "product_320": _product(320),
    "exp": _on(64, torch.exp),
    "softmax": _on(64, lambda x: x.softmax(1)),
    "sum": _on(256, lambda x: x.sum(1)),
    "cumsum": _on(32, lambda x: x.cumsum(1)),
    "sort": _on(4, lambda x: x.sort(1).values),
    "add": _on(128, lambda x: x + x),
    "gelu": _on(32, torch.nn.functional.gelu),
    "layer_norm": _on(64, lambda x: torch.nn.functional.layer_norm(x, (1024,))),
    "topk": _on(8, lambda x: x.topk(8).values),
}


def cases(slowdown: float = 0.0) -> dict[str, Case]:
    found = (
        _case(f"steady/{name}", make, slowdown if f"steady/{name}" == PLANTED else 0.0) for name, make in _WORK.items()
    )
    return {case.name: case for case in found}


if __name__ == "__main__":
    from rlcore.bench.child import serve

    serve(lambda: cases(float(sys.argv[1])))
