"""Draws one token a row: see ``rlcore.engines.sampling.draws``.

Legend: B = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.engines.sampling.draws import drawn, uniform
from rlcore.engines.sampling.params import SamplingParams
from rlcore.kernels.token.nucleus import keep_mask


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
        token_B = drawn(logprob_BV, uniform(self._key_B, position), is_restricted=self._has_restriction)
        return torch.where(self._is_greedy_B, scaled_BV.argmax(-1), token_B) if self._has_greedy else token_B
