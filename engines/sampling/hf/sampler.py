"""Draws one token a row, with random numbers that depend only on the request.

Row b at position s of its completion uses ``u = splitmix64(key_b, s)`` in [0, 1), where the key is a hash of
seed, prompt and sample index, and takes the first token whose cumulative probability exceeds u. So a request
gives the same samples whatever it is batched with, in any order, and on any device up to rounding.

splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
Legend: B = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.engines.sampling.params import SamplingParams
from rlcore.kernels.token.nucleus import keep_mask

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def uniform(key_B: Tensor, position: int) -> Tensor:
    """Return [B] float32 multiples of 2^-24 in [0, 1): number ``position`` of each key's splitmix64 stream."""
    bits_B = key_B + _signed((position + 1) * _GAMMA)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits_B = (bits_B ^ _shift_right(bits_B, shift)) * _signed(multiplier)
    bits_B = bits_B ^ _shift_right(bits_B, 31)
    return _shift_right(bits_B, 40).float() * 2.0**-24


def _signed(value: int) -> int:
    """Return the int64 with the same low 64 bits; products of int64 tensors wrap, as the hash needs."""
    return (value + 2**63) % 2**64 - 2**63


def _shift_right(bits_B: Tensor, count: int) -> Tensor:
    return (bits_B >> count) & ((1 << (64 - count)) - 1)


class Sampler:
    """The sampling state of the rows of a batch."""

    def __init__(self, params: Sequence[SamplingParams], keys: Sequence[int], device: torch.device) -> None:
        def column(values: list[float] | list[int] | list[bool]) -> Tensor:
            return torch.tensor(values, device=device)

        # A step that no row needs is not computed. Greedy rows need the plain distribution.
        self._is_all_greedy = all(p.is_greedy for p in params)
        self._has_greedy = any(p.is_greedy for p in params)
        self._has_temperature = any(not p.is_greedy and p.temperature != 1 for p in params)
        self._has_restriction = any(p.restricts_tokens for p in params)
        self._key_B = column(list(keys))
        self._is_greedy_B = column([p.is_greedy for p in params])
        self._temperature_B = column([1.0 if p.is_greedy else float(p.temperature) for p in params])
        self._top_p_B = column([1.0 if p.is_greedy else float(p.top_p) for p in params])
        self._top_k_B = column([-1 if p.is_greedy else p.top_k for p in params])

    def select(self, index_B: Tensor) -> None:
        """Keep only these rows."""
        self._key_B = self._key_B[index_B]
        self._is_greedy_B = self._is_greedy_B[index_B]
        self._temperature_B = self._temperature_B[index_B]
        self._top_p_B = self._top_p_B[index_B]
        self._top_k_B = self._top_k_B[index_B]

    def sample(self, logits_BV: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Draw the token at ``position`` of every completion.

        Args:
            logits_BV: [B, V] float, of the next token.
            position: how many tokens each completion has.

        Returns:
            token [B] int64, and its log-probability [B] float32 in the distribution it was drawn from: after
            temperature, top-k and top-p, renormalised. Greedy rows: in the plain distribution, as in vLLM.
        """
        scaled_BV = logits_BV.float()
        if self._has_restriction:
            keep_BV = keep_mask(scaled_BV, temperature=self._temperature_B, top_p=self._top_p_B, top_k=self._top_k_B)
            scaled_BV = scaled_BV.masked_fill(~keep_BV, -torch.inf)
        if self._has_temperature:
            scaled_BV = scaled_BV / self._temperature_B[:, None]
        logprob_BV = scaled_BV.log_softmax(-1)
        token_B = self._choose(scaled_BV, logprob_BV, position)
        return token_B, logprob_BV.gather(1, token_B[:, None]).squeeze(1)

    def _choose(self, scaled_BV: Tensor, logprob_BV: Tensor, position: int) -> Tensor:
        if self._is_all_greedy:
            return scaled_BV.argmax(-1)
        cdf_BV = logprob_BV.exp().cumsum(-1)
        # The sum is 1 but for rounding. With right=True a token of probability 0 is never the first above u.
        target_B1 = uniform(self._key_B, position)[:, None] * cdf_BV[:, -1:]
        token_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=logprob_BV.shape[1] - 1)
        if self._has_restriction:
            # A parallel sum need not be monotone to the last bit, which could let a masked token through.
            is_masked_B1 = logprob_BV.gather(1, token_B1).isneginf()
            token_B1 = torch.where(is_masked_B1, scaled_BV.argmax(-1, keepdim=True), token_B1)
        token_B = token_B1.squeeze(1)
        return torch.where(self._is_greedy_B, scaled_BV.argmax(-1), token_B) if self._has_greedy else token_B
