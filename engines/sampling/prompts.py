"""Prompts and parameters of requests: checked before they run, tokenised, and their completions made texts."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, overload

import torch
from torch import Tensor

from rlcore.engines.sampling.completion import Completion, FinishReason, VersionSpan
from rlcore.engines.sampling.model_folder import ModelFolder, load_tokenizer
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import InvalidInputError
from rlcore.image_inputs import ImageInputs


@dataclass(frozen=True, eq=False)
class MultimodalPrompt(Sequence[int]):
    """The token ids of a prompt, and what its model reads beside them; elsewhere it is used as its token ids."""

    token_ids: tuple[int, ...]
    inputs: dict[str, Tensor]
    """Rows by name, in host memory, such as the pixels of images."""

    @classmethod
    def of(cls, number: int, given: Mapping[str, Any]) -> MultimodalPrompt:
        """Return the prompt that a processor of transformers made, or a dict like it.

        Raises:
            InvalidInputError: names the prompt, and what it lacks.
        """
        ids = given.get("prompt_token_ids", given.get("input_ids"))
        flat = ids.squeeze(0).tolist() if isinstance(ids, Tensor) and ids.ndim == 2 and len(ids) == 1 else ids
        flat = flat.tolist() if isinstance(flat, Tensor) else flat
        if isinstance(flat, str) or not _are_token_ids(flat):
            shape = f" of shape {list(ids.shape)}" if isinstance(ids, Tensor) else ""
            raise InvalidInputError(
                f"prompt {number} is a dict, which needs the token ids of one prompt as prompt_token_ids or input_ids; "
                f"got {ids!r:.100}{shape}"
            )
        inputs = {name: value for name, value in given.items() if name not in _OF_TOKENS}
        for name, value in inputs.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                raise InvalidInputError(
                    f"{name} of prompt {number} must be a tensor [rows, ...], as the model's processor makes with "
                    f"return_tensors='pt'; got {value!r:.100}"
                )
        return cls(tuple(map(int, flat)), {name: value.detach().cpu() for name, value in inputs.items()})

    @functools.cached_property
    def digest(self) -> bytes:
        """Tells prompts of equal tokens apart."""
        found = hashlib.blake2b(array("q", self.token_ids).tobytes(), digest_size=16)
        for name, value in sorted(self.inputs.items()):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.digest()

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.token_ids[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MultimodalPrompt) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


Prompt = str | Sequence[int] | MultimodalPrompt
PromptLike = str | Sequence[int] | Mapping[str, Any]
"""A prompt as a user gives it; a mapping is what a processor of transformers made of text and images."""
ParamsLike = SamplingParams | Mapping[str, Any] | None
_OF_TOKENS = ("prompt_token_ids", "input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""Entries of a processor's output that follow from the tokens, or are them."""


def inputs_of(prompt: Prompt) -> dict[str, Tensor]:
    """Return what a prompt has beside its tokens."""
    return prompt.inputs if isinstance(prompt, MultimodalPrompt) else {}


def as_key(prompt: Sequence[int]) -> tuple[int, ...] | MultimodalPrompt:
    """Return the prompt as a value that is equal for equal prompts, and has a hash."""
    return prompt if isinstance(prompt, MultimodalPrompt) else tuple(prompt)


class PromptReader:
    """The tokenizer and the limits of one model folder.

    Args:
        images: what the model takes of images; None if it reads none.
    """

    def __init__(
        self,
        folder: ModelFolder,
        max_positions: int | None,
        positions_name: str = "max_position_embeddings",
        images: ImageInputs | None = None,
    ) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.stop_token_ids = folder.stop_token_ids
        self._vocab_size = folder.vocab_size
        self.max_positions, self._positions_name = max_positions, positions_name
        self.max_prompt: int | None = None
        """The most tokens of a prompt, where an engine takes fewer than the positions would hold."""
        self._folder, self.images = folder.path, images

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
        if self.max_prompt is not None and len(prompt) > self.max_prompt:
            raise InvalidInputError(
                f"prompt {number} has {len(prompt)} tokens; this engine takes prompts of at most {self.max_prompt} "
                f"({self._positions_name}): shorten it"
            )
        if self.images is not None:
            self.image_spans(prompt, f"prompt {number}")
        elif inputs := inputs_of(prompt):
            raise InvalidInputError(
                f"prompt {number} has {', '.join(sorted(inputs))}, and this engine reads no images for the model at "
                f"{self._folder}; give its token ids alone"
            )

    def image_spans(self, prompt: Sequence[int], whose: str = "the prompt") -> list[range]:
        """Return the tokens of each image of a prompt.

        Raises:
            InvalidInputError: the images are none of this model, or others than the tokens stand for.
        """
        if self.images is None:
            return []
        return self.images.spans(whose, torch.tensor(list(prompt)), self.images.rows_of(inputs_of(prompt)))

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
        InvalidInputError: names the prompt that is neither a text, nor a list of token ids, nor a dict with them.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise InvalidInputError(
            f"prompts must be a text or a list of texts or of lists of token ids, got {given!r:.200}; with images "
            "it is a list of dicts that the model's processor made"
        )
    prompts = [
        MultimodalPrompt.of(number, prompt) if isinstance(prompt, Mapping) else prompt
        for number, prompt in enumerate(given)
    ]
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, MultimodalPrompt)) and not _are_token_ids(prompt):
            raise InvalidInputError(
                f"prompt {number} must be a text or a list of token ids, got {prompt!r:.200}; with images it is a dict "
                "that the model's processor made"
            )
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
