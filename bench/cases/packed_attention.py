"""Forward and backward of transformer layers over packed sequences, beside the same sequences padded.

Letters: T tokens, L longest sequence, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.device import Device
from rlcore.errors import MissingDependencyError
from rlcore.tensor_data import dtype_name

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative, between packed and padded."""


@dataclass(frozen=True, slots=True)
class _LayersSize:
    T: int
    H: int
    heads: int
    kv_heads: int
    layers: int
    longest: int
    shortest: int
    dtype: torch.dtype


_ACCELERATOR = _LayersSize(16_384, 1536, 12, 2, 4, 4096, 512, torch.bfloat16)
"""Layers of Qwen2.5-1.5B. Backward holds 0.36 MB for each token that runs, and padded 25 x 4,096 do: 37 GB, where
shortest sequences of 64 (193 x 4,096 tokens) would take 288 GB."""
_HOST = _LayersSize(1024, 128, 4, 2, 2, 512, 16, torch.float32)


def _even(size: _LayersSize) -> list[int]:
    return [size.T // 8] * 8


def _uneven(size: _LayersSize) -> list[int]:
    """One of the longest, and the rest each the shortest."""
    return [size.longest] + [size.shortest] * ((size.T - size.longest) // size.shortest)


def _prepare(lengths_of: Callable[[_LayersSize], list[int]], device: Device) -> Work:
    try:
        from transformers import Qwen2Config, Qwen2Model

        from rlcore.packed.attention import explain, packed_hidden_states
    except ImportError as error:
        raise MissingDependencyError("transformers", needed_for="this case", extra="hf") from error
    size = _HOST if device.spec.is_host else _ACCELERATOR
    lengths = lengths_of(size)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=size.H,
        intermediate_size=4 * size.H,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
    )
    device.seed(0)
    with device.torch_device:
        decoder = Qwen2Model._from_config(config, dtype=size.dtype)
    input_ids = torch.randint(1024, (sum(lengths),), device=device.torch_device)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    weight_TH = torch.randn(sum(lengths), size.H, device=device.torch_device)
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
            "H": size.H,
            "layers": size.layers,
            "dtype": dtype_name(size.dtype),
        },
        runs_on="stream",
    )


cases = (
    Case(
        "packed_attention/even",
        "forward and backward of layers over 8 sequences of one length, packed and padded",
        functools.partial(_prepare, _even),
    ),
    Case(
        "packed_attention/uneven",
        "forward and backward of layers over one long sequence and many short ones, packed and padded",
        functools.partial(_prepare, _uneven),
    ),
)
