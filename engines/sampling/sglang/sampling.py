"""Sampling in SGLang's scheduler as rlcore defines it: seeds of requests, and log-probs of what was sampled from.

SGLang's own sampler takes seeds only where all of its kernels are deterministic, and gives log-probs from before top-p
and top-k. A greedy request has temperature 0, which SGLang makes temperature 1 and top-k 1.

Legend: B = rows, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlcore.engines.sampling.draws import drawn, uniform
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.sglang.interfaces import SglangSamplingInfo
from rlcore.kernels.token.nucleus import keep_mask

_ALMOST_ONE = 1.0 + 2.0**-23
"""The least float32 above 1: tells a request with top-k 1 and temperature 1 from a greedy one."""


def request_params(params: SamplingParams, stop_token_ids: list[int], key: int) -> dict[str, Any]:
    """Return SGLang's parameters of one sample; ``key`` is of its random numbers."""
    temperature = _ALMOST_ONE if params.top_k == 1 and params.temperature == 1 else params.temperature
    return {
        "temperature": temperature,
        "top_p": 1.0 if params.is_greedy else params.top_p,
        "top_k": params.top_k if params.top_k > 0 and not params.is_greedy else -1,
        "max_new_tokens": params.max_tokens,
        "stop_token_ids": stop_token_ids,  # the model's own stops are among them; the scheduler knows no others
        "sampling_seed": key,
    }


def sample(logits_BV: Tensor, info: SglangSamplingInfo, position_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the next token of each row.

    Args:
        logits_BV: [B, V] float, of the next token; they are not changed.
        position_B: [B] positions of the tokens in their sequences.

    Returns:
        token [B] int64, and the log-probs [B, V] float32 of the distribution it was drawn from. Greedy rows: of the
        plain distribution, as in vLLM.
    """
    scaled_BV = logits_BV.float() / info.temperatures
    if not (info.need_top_k_sampling or info.need_top_p_sampling):
        logprob_BV = scaled_BV.log_softmax(-1)
        return drawn(logprob_BV, uniform(info.sampling_seed, position_B), is_restricted=False), logprob_BV
    is_greedy_B = (info.top_ks == 1) & (info.temperatures.flatten() == 1)
    if info.is_all_greedy:
        likeliest_B = scaled_BV.argmax(-1)
        alone_BV = torch.full_like(scaled_BV, -torch.inf).scatter_(1, likeliest_B[:, None], 0.0)
        return likeliest_B, torch.where(is_greedy_B[:, None], scaled_BV.log_softmax(-1), alone_BV)
    top_k_B = info.top_ks.masked_fill(is_greedy_B, -1)
    keep_BV = keep_mask(scaled_BV, temperature=1.0, top_p=info.top_ps, top_k=top_k_B)
    logprob_BV = scaled_BV.masked_fill(~keep_BV, -torch.inf).log_softmax(-1)
    token_B = drawn(logprob_BV, uniform(info.sampling_seed, position_B), is_restricted=True)
    return torch.where(is_greedy_B, scaled_BV.argmax(-1), token_B), logprob_BV
