"""Kernels that triton-ascend lowers although an NPU cannot run them, or not well; says what the lint finds in each.

python -m tests.devices.ascend.planted_kernels     in an environment of triton_environment.py; prints JSON
"""

from __future__ import annotations

import json
from typing import Any

import triton
import triton.language as tl

from rlcore.kernels.triton_programs import limits
from tests.devices.ascend.kernel_lint import findings
from tests.devices.ascend.lowering import DEVICE, lower

# mypy: allow-untyped-defs, allow-untyped-decorators


@triton.jit
def sound(x, y, n):
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0) * 2.0, mask=i < n)


@triton.jit
def large(x, y, n):
    i = tl.arange(0, 1 << 20)
    tl.store(y + i, tl.load(x + i) * 2.0)


@triton.jit
def assembly(x, y, n):
    i = tl.arange(0, 64)
    moved = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [tl.load(x + i)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(y + i, moved)


@triton.jit
def wide(x, y, n):
    i = tl.arange(0, 64)
    tl.store(y + i, (tl.load(x + i).to(tl.float64) * 2.0).to(tl.float32))


@triton.jit
def sorting(x, y, n):
    i = tl.arange(0, 64)
    tl.store(y + i, tl.sort(tl.load(x + i)))


@triton.jit
def adding(x, counts, n):
    i = tl.arange(0, 64)
    tl.atomic_add(counts + i, tl.load(x + i).to(tl.int64))


@triton.jit
def describing(x, y, n):
    source = tl.make_tensor_descriptor(x, [n, n], [n, 1], [16, 16])
    destination = tl.make_tensor_descriptor(y, [n, n], [n, 1], [16, 16])
    destination.store([0, 0], source.load([0, 0]))


@triton.jit
def gathering(x, places, y, n):
    i = tl.arange(0, 64)
    tl.store(y + i, tl.load(x + tl.load(places + i)))


@triton.jit
def hiding(x, y, n):
    i = tl.arange(0, 16)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0))


@triton.jit
def skipping(x, y, n):
    i = tl.arange(0, 64)
    tl.store(y + i, tl.load(x + i), mask=i % 2 == 0)


def found(kernel: Any, **given: str) -> list[str]:
    types = {name: given.get(name, "i32" if name == "n" else "*fp32") for name in kernel.arg_names}
    limited = limits(DEVICE)
    assert limited is not None
    return findings(*lower(kernel, types), limited)


if __name__ == "__main__":
    plain = (sound, large, assembly, wide, sorting, describing, hiding, skipping)
    said = {kernel.__name__: found(kernel) for kernel in plain}
    said |= {"adding": found(adding, counts="*i64"), "gathering": found(gathering, places="*i32")}
    print(json.dumps(said))
