"""Prompts and parameters of requests: checked before they run, tokenised, and their completions made texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

from rlcore.engines.sampling.completion import Completion, FinishReason, VersionSpan
from rlcore.engines.sampling.model_folder import ModelFolder, load_tokenizer
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import InvalidInputError

Prompt = str | Sequence[int]
ParamsLike = SamplingParams | Mapping[str, Any] | None


class PromptReader:
    """The tokenizer and the limits of one model folder."""

    def __init__(
        self, folder: ModelFolder, max_positions: int | None, positions_name: str = "max_position_embeddings"
    ) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.stop_token_ids = folder.stop_token_ids
        self._vocab_size = folder.vocab_size
        self.max_positions, self._positions_name = max_positions, positions_name

    def read(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], numbers: Sequence[int] | None = None
    ) -> list[Sequence[int]]:
        """Return the token ids of each prompt; token ids are returned as they are.

        Args:
            numbers: what errors call the prompts; None counts from 0.

        Raises:
            InvalidInputError: names the prompt and what is wrong with it or its parameters.
        """
        token_ids = self._encode(prompts)
        for number, prompt, one in zip(numbers or range(len(prompts)), token_ids, params, strict=True):
            self._check(number, prompt, one)
        return token_ids

    def _encode(self, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts and self.tokenizer is None:
            raise InvalidInputError("the model folder has no tokenizer; give prompts as token ids")
        encoded = iter(self.tokenizer(texts)["input_ids"] if texts and self.tokenizer else ())
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _check(self, number: int, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise InvalidInputError(f"prompt {number} is empty; give at least one token")
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            bad = next(token for token in prompt if not 0 <= token < self._vocab_size)
            raise InvalidInputError(
                f"prompt {number} holds token id {bad}; the model's token ids are 0 to {self._vocab_size - 1}"
            )
        if bad_stops := [token for token in params.stop_token_ids if token >= self._vocab_size]:
            raise InvalidInputError(
                f"stop_token_ids of prompt {number} holds {bad_stops[0]}; "
                f"the model's token ids are 0 to {self._vocab_size - 1}"
            )
        longest = len(prompt) + params.max_tokens
        if self.max_positions is not None and longest > self.max_positions:
            raise InvalidInputError(
                f"prompt {number} has {len(prompt)} tokens and max_tokens is {params.max_tokens}, "
                f"together {longest}; the model has {self.max_positions} positions "
                f"({self._positions_name}): shorten the prompt or lower max_tokens"
            )

    def completion(
        self,
        token_ids: list[int],
        logprobs: list[float],
        *,
        is_stopped: bool,
        spans: tuple[VersionSpan, ...],
        routed_experts: Tensor | None = None,
    ) -> Completion:
        """Return sampled tokens as a ``Completion``; ``is_stopped``: the last one is a stop token."""
        reason: FinishReason = "stop" if is_stopped else "length"
        spoken = token_ids[:-1] if is_stopped else token_ids
        text = "" if self.tokenizer is None else self.tokenizer.decode(spoken, skip_special_tokens=True)
        return Completion(token_ids, logprobs, text, reason, spans, routed_experts)


def prompts_of(given: Any) -> list[Prompt]:
    """Return the prompts that a user gave as a list; a single text is one prompt.

    Raises:
        InvalidInputError: names the prompt that is neither a text nor a list of token ids.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise InvalidInputError(f"prompts must be a text or a list of texts or of lists of token ids, got {given!r}")
    prompts = list(given)
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _are_token_ids(prompt):
            raise InvalidInputError(f"prompt {number} must be a text or a list of token ids, got {prompt!r}")
    return prompts


def _are_token_ids(prompt: Any) -> bool:
    if not isinstance(prompt, Sequence):
        return False
    kinds = set(map(type, prompt))
    return bool not in kinds and all(issubclass(kind, Integral) for kind in kinds)


def params_of_each(prompts: Sequence[Any], params: ParamsLike | Sequence[ParamsLike]) -> list[SamplingParams]:
    """Return sampling parameters for each prompt, from one for all or one each."""
    if isinstance(params, str) or not isinstance(params, Sequence):
        return [SamplingParams.of(params)] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidInputError(
            f"got {len(params)} sampling parameters for {len(prompts)} prompts; give one or one each"
        )
    return [SamplingParams.of(one) for one in params]
