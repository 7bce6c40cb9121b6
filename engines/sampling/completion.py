"""The results of generation, with vLLM's names: ``outputs[i].outputs[j].token_ids`` reads the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``start <= i < end`` of a completion were sampled from one version of the weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: list[int]
    """The new tokens, the stop token included if one was sampled."""
    logprobs: list[float]
    """Natural log of the probability each token had in the distribution it was sampled from; <= 0.

    That is after temperature, top-k and top-p, renormalised. Greedy tokens have that of temperature 1.
    """
    text: str
    """``token_ids`` decoded, without the stop token and special tokens; "" without a tokenizer."""
    finish_reason: FinishReason
    """"stop": the last token is a stop token; "length": ``max_tokens`` were sampled."""
    version_spans: tuple[VersionSpan, ...]
    """The versions of the weights that made the tokens, in order, covering all of ``token_ids``."""
    routed_experts: Tensor | None = None
    """The experts that each token was sent to, prompt and completion but for the last token, which never ran:
    [tokens, layers, experts a token] int16. None unless the engine was built with ``enable_return_routed_experts``."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All completions of one prompt, by sample index."""

    prompt: str | None
    """The prompt's text; None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    inputs: dict[str, Tensor] = field(default_factory=dict, compare=False)
    """The inputs of the prompt beside its tokens, such as pixels of images; ``collate`` takes them into the batch."""
