"""Causal attention of torch at the lengths of reinforcement learning, and layers over packed sequences.

Letters: L length, N query heads, G query heads of one head of keys, D size of a head, T tokens, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.bench.cases.models import QWEN_0_5B, ModelShape, transformers_class
from rlcore.device import Device
from rlcore.tensor_data import dtype_name

_HEADS, _HEAD_SIZE = 32, 128
"""The heads of an 8B model."""
_LENGTHS = (4096, 16_384, 65_536)
_HOST_HEADS, _HOST_HEAD_SIZE, _HOST_LENGTHS = 4, 64, (256, 1024)
_CHECKED = 8
"""The last queries, which see all keys, of the heads that share the first head of keys; and as many keys."""


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
    q, k, v, grad_output = (
        torch.randn(1, N, L, D, device=device.torch_device, dtype=dtype).requires_grad_(backward) for _ in range(4)
    )

    def run() -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad_output)) if backward else (out,)

    def check(found: tuple[Tensor, ...]) -> None:
        _check(found, q, k, v, grad_output)

    limits = _limits(N, L, D, dtype, backward=backward)
    return Contender("torch.sdpa", run, check, params={"L": L}, limits=limits)


def _limits(N: int, L: int, D: int, dtype: torch.dtype, *, backward: bool) -> dict[str, int]:
    # Two products of L x L x D a head, of which causality needs half; the backward is five of them, two recomputed.
    return {f"product/{dtype_name(dtype)}": round((3.5 if backward else 1.0) * 2 * N * L * L * D)}


def _check(found: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor) -> None:
    """Compare the outputs of the last queries, their gradients, and those of the last keys, with float64."""
    G = q.shape[1] // k.shape[1]

    def last(x: Tensor, heads: int) -> Tensor:
        return x[0, :heads, -_CHECKED:].double()

    queries, keys, values = (x.detach().double().requires_grad_() for x in (q[0, :G, -_CHECKED:], k[0, :1], v[0, :1]))
    scores = queries @ keys.mT * queries.shape[-1] ** -0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[-1] - _CHECKED + 1)
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    pairs = [("output", last(found[0], G), want)]
    if len(found) > 1:
        of_queries, of_keys, of_values = torch.autograd.grad(want, (queries, keys, values), last(grad_output, G))
        pairs += [
            ("gradient of the queries", last(found[1], G), of_queries),
            ("gradient of the keys", last(found[2], 1), of_keys[:, -_CHECKED:]),
            ("gradient of the values", last(found[3], 1), of_values[:, -_CHECKED:]),
        ]
    for name, got, true in pairs:
        error = float(((got - true).norm() / true.norm()).detach())
        tolerance = 8 * max(torch.finfo(q.dtype).eps, 2**-11)
        expect(error <= tolerance, f"the {name} differs from float64 by {error:.1e}, more than {tolerance:.1e}")


# --------------------------------------------------------------------- one long sequence, as the only one of a pack

_LONG, _HOST_LONG = 65_536, 256
_KERNELS = {"SDPA, flash": SDPBackend.FLASH_ATTENTION, "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION}


def _prepare_long(backward: bool, device: Device) -> Work:
    transformers_class("Qwen2Config")
    from rlcore.packed.attention_call import AttentionCall  # transformers is an extra
    from rlcore.packed.choice import LONG, are_long, implementations, why_not
    from rlcore.packed.implementations import PackedSequences

    device.seed(0)
    is_host = device.spec.is_host
    dtype = torch.float32 if is_host else torch.bfloat16
    N, kv_heads, D, L = (4, 2, 64, _HOST_LONG) if is_host else (QWEN_0_5B.heads, QWEN_0_5B.kv_heads, 64, _LONG)

    def drawn(heads: int) -> Tensor:
        rows = torch.randn(1, L, heads, D, device=device.torch_device, dtype=dtype)
        return rows.transpose(1, 2).requires_grad_(backward)  # as projections give them

    q, k, v, grad_output = drawn(N), drawn(kv_heads), drawn(kv_heads), drawn(N).detach()
    call = AttentionCall(query_heads=N, kv_heads=kv_heads, head_dim=D, value_dim=D)
    cu_seqlens = torch.tensor([0, L], dtype=torch.int32, device=device.torch_device)
    layer = SimpleNamespace(training=True, is_causal=True, num_key_value_groups=N // kv_heads)

    def by_packed(name: str) -> Tensor:
        packed = PackedSequences(cu_seqlens, (L,), lambda *_: name)
        attend = implementations(device.type)[name].attend
        return attend(layer, q, k, v, packed, own="sdpa", scaling=D**-0.5).transpose(1, 2)

    def by_torch(kernel: SDPBackend) -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def contender(name: str, attend: Callable[[], Tensor]) -> Contender:
        def run() -> tuple[Tensor, ...]:
            out = attend()
            return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad_output)) if backward else (out,)

        return Contender(name, run, lambda found: _check(found, q, k, v, grad_output))

    def serves(name: str) -> bool:
        is_meant = name != LONG or are_long(frozenset([call]), QWEN_0_5B.layers, [(1, L)])
        return is_meant and why_not(name, call, device.torch_device, dtype) is None

    ways: dict[str, Callable[[], Tensor]] = {
        name: functools.partial(by_packed, name) for name in implementations(device.type) if serves(name)
    }
    if not is_host:
        ways |= {name: functools.partial(by_torch, kernel) for name, kernel in _KERNELS.items()}
    return Work(
        tuple(contender(name, attend) for name, attend in ways.items()),
        {"L": L, "heads": N, "kv_heads": kv_heads, "head_size": D, "dtype": dtype_name(dtype)},
        limits=_limits(N, L, D, dtype, backward=backward),
        runs_on="stream",
    )


# ------------------------------------------------------------------------------- layers over packed sequences

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative, between packed and padded."""


@dataclass(frozen=True, slots=True)
class _LayersSize:
    shape: ModelShape
    T: int
    longest: int
    shortest: int
    dtype: torch.dtype


_ACCELERATOR_LAYERS = _LayersSize(ModelShape("", 1536, 6144, 4, 12, 2, 1024), 16_384, 4096, 512, torch.bfloat16)
"""Layers of Qwen2.5-1.5B. Backward holds 0.36 MB for each token that runs, and padded 25 x 4,096 do: 37 GB, where
shortest sequences of 64 (193 x 4,096 tokens) would take 288 GB."""
_HOST_LAYERS = _LayersSize(ModelShape("", 128, 512, 2, 4, 2, 1024, head_size=32), 1024, 512, 16, torch.float32)


def _even(size: _LayersSize) -> list[int]:
    return [size.T // 8] * 8


def _uneven(size: _LayersSize) -> list[int]:
    """Return one of the longest, and the rest each the shortest."""
    return [size.longest] + [size.shortest] * ((size.T - size.longest) // size.shortest)


def _prepare_packed(lengths_of: Callable[[_LayersSize], list[int]], device: Device) -> Work:
    model_class = transformers_class("Qwen2Model")
    from rlcore.packed.attention import explain, packed_hidden_states  # transformers is an extra

    size = _HOST_LAYERS if device.spec.is_host else _ACCELERATOR_LAYERS
    shape, lengths = size.shape, lengths_of(size)
    device.seed(0)
    with device.torch_device:
        decoder = model_class._from_config(shape.config(), dtype=size.dtype)
    input_ids = torch.randint(shape.vocabulary, (sum(lengths),), device=device.torch_device)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    weight_TH = torch.randn(sum(lengths), shape.hidden, device=device.torch_device)
    leaves = tuple(decoder.layers[0].parameters())

    def run(implementation: str | None) -> tuple[Tensor, ...]:
        hidden_TH = packed_hidden_states(decoder, input_ids, cu_seqlens, implementation=implementation)
        return hidden_TH.detach(), *torch.autograd.grad((hidden_TH * weight_TH).sum(), leaves)

    expected = run("padded")

    def check(result: tuple[Tensor, ...]) -> None:
        for found, wanted in zip(result, expected, strict=True):
            error = float((found - wanted).float().norm() / wanted.float().norm())
            expect(error <= _TOLERANCE[size.dtype], f"packed differs from padded by {error:.1e}")

    chosen = explain(decoder, device.torch_device, size.dtype).implementation
    return Work(
        (
            Contender(chosen, functools.partial(run, None), check),
            Contender("padded", functools.partial(run, "padded"), check),
        ),
        {
            "T": sum(lengths),
            "sequences": len(lengths),
            "longest": max(lengths),
            "H": shape.hidden,
            "layers": shape.layers,
            "dtype": dtype_name(size.dtype),
        },
        runs_on="stream",
    )


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
    Case(
        "packed_attention/one_long_forward",
        "one sequence of 64k tokens with the heads of a 0.5B: packed attention beside torch's by kernel, forward",
        functools.partial(_prepare_long, False),
        estimate_s=4.0,
    ),
    Case(
        "packed_attention/one_long",
        "one sequence of 64k tokens with the heads of a 0.5B: packed attention beside torch's by kernel, both ways",
        functools.partial(_prepare_long, True),
        estimate_s=6.0,
    ),
    Case(
        "packed_attention/even",
        "forward and backward of layers over 8 sequences of one length, packed and padded",
        functools.partial(_prepare_packed, _even),
    ),
    Case(
        "packed_attention/uneven",
        "forward and backward of layers over one long sequence and many short ones, packed and padded",
        functools.partial(_prepare_packed, _uneven),
    ),
)
