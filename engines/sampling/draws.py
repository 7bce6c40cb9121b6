"""Draws of one token a row, with random numbers that depend only on the request.

A row at position s takes ``u = splitmix64(key, s)`` in [0, 1), where the key is a hash of seed, prompt and sample
index, and the first token whose cumulative probability exceeds u. So a request gives the same samples whatever it is
batched with, in any order, and on any device up to rounding.

splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
Legend: B = rows, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def uniform(key_B: Tensor, position: int | Tensor) -> Tensor:
    """Return [B] float32 multiples of 2^-24 in [0, 1): number ``position`` of each key's splitmix64 stream.

    Args:
        position: one for all rows, or [B] int64.
    """
    step = _signed((position + 1) * _GAMMA) if isinstance(position, int) else (position + 1) * _signed(_GAMMA)
    bits_B = key_B + step
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits_B = (bits_B ^ _shift_right(bits_B, shift)) * _signed(multiplier)
    bits_B = bits_B ^ _shift_right(bits_B, 31)
    return _shift_right(bits_B, 40).float() * 2.0**-24


def _signed(value: int) -> int:
    """Return the int64 with the same low 64 bits; products of int64 tensors wrap, as the hash needs."""
    return (value + 2**63) % 2**64 - 2**63


def _shift_right(bits_B: Tensor, count: int) -> Tensor:
    return (bits_B >> count) & ((1 << (64 - count)) - 1)


def drawn(logprob_BV: Tensor, uniform_B: Tensor, *, is_restricted: bool) -> Tensor:
    """Return the token [B] int64 of each row at which its cumulative probability first exceeds ``uniform_B``.

    Args:
        is_restricted: some tokens have probability 0.
    """
    cdf_BV = logprob_BV.exp().cumsum(-1)
    # The sum is 1 but for rounding. With right=True a token of probability 0 is never the first above u.
    target_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
    token_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=logprob_BV.shape[1] - 1)
    if is_restricted:
        # A parallel sum need not be monotone to the last bit, which could let a masked token through.
        is_masked_B1 = logprob_BV.gather(1, token_B1).isneginf()
        token_B1 = torch.where(is_masked_B1, logprob_BV.argmax(-1, keepdim=True), token_B1)
    return token_B1.squeeze(1)
