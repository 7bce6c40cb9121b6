"""Causal attention of torch at the lengths of reinforcement learning, forward, and forward with backward.

Letters: L length, N query heads, D size of a head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.device import Device
from rlcore.tensor_data import dtype_name

_HEADS, _HEAD_SIZE = 32, 128
"""The heads of an 8B model."""
_LENGTHS = (4096, 16_384, 65_536)
_HOST_HEADS, _HOST_HEAD_SIZE, _HOST_LENGTHS = 4, 64, (256, 1024)
_CHECKED = 8
"""The last queries, which see all keys, of the first head."""


def _prepare(backward: bool, device: Device) -> Work:
    device.seed(0)
    is_host = device.spec.is_host
    dtype = torch.float32 if is_host else torch.bfloat16
    N, D = (_HOST_HEADS, _HOST_HEAD_SIZE) if is_host else (_HEADS, _HEAD_SIZE)
    contenders = tuple(
        _contender(device, L, (N, D), dtype, backward=backward) for L in (_HOST_LENGTHS if is_host else _LENGTHS)
    )
    params: dict[str, int | float | str] = {"heads": N, "head_size": D, "dtype": dtype_name(dtype)}
    return Work(contenders, params, runs_on="stream")


def _contender(device: Device, L: int, heads: tuple[int, int], dtype: torch.dtype, *, backward: bool) -> Contender:
    N, D = heads
    q, k, v, upstream = (
        torch.randn(1, N, L, D, device=device.torch_device, dtype=dtype).requires_grad_(backward) for _ in range(4)
    )

    def run() -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)) if backward else (out,)

    def check(found: tuple[Tensor, ...]) -> None:
        _check(found, q, k, v, upstream)

    # Two products of L x L x D a head, of which causality needs half; the backward is five of them, two recomputed.
    flops = round((3.5 if backward else 1.0) * 2 * N * L * L * D)
    name = dtype_name(dtype)
    return Contender("torch.sdpa", run, check, params={"L": L}, limits={f"product/{name}": flops})


def _check(found: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> None:
    """Outputs of the last queries, and the gradient of those queries, in float64."""
    queries, keys, values = q[0, 0, -_CHECKED:].double().detach().requires_grad_(), k[0, 0].double(), v[0, 0].double()
    scores = queries @ keys.detach().T * queries.shape[-1] ** -0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[1] - _CHECKED + 1)
    want = scores.masked_fill(hidden, -torch.inf).softmax(1) @ values.detach()
    pairs = [("output", found[0][0, 0, -_CHECKED:], want)]
    if len(found) > 1:
        (gradient,) = torch.autograd.grad(want, queries, upstream[0, 0, -_CHECKED:].double())
        pairs.append(("gradient of the queries", found[1][0, 0, -_CHECKED:], gradient))
    for name, got, true in pairs:
        error = float(((got.double() - true).norm() / true.norm()).detach())
        tolerance = 8 * max(torch.finfo(q.dtype).eps, 2**-11)
        expect(error <= tolerance, f"the {name} differs from float64 by {error:.1e}, more than {tolerance:.1e}")


cases = (
    Case(
        "attention/forward",
        "causal attention by torch, forward",
        functools.partial(_prepare, False),
        effort="quick",
        estimate_s=4.0,
    ),
    Case(
        "attention/backward",
        "causal attention by torch, forward and backward",
        functools.partial(_prepare, True),
        estimate_s=6.0,
    ),
)
