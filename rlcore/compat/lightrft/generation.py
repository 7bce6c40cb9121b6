"""Requests and outputs of LightRFT's rollouts, to and from rlcore's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import InvalidInputError, UnsupportedError


class EngineStatus(Enum):
    """The inference engine holds memory of the device (``WAKEUP``), or none."""

    SLEEPED = 0
    WAKEUP = 1


@dataclass
class GeneratedSequence:
    """One completion. ``logprobs`` are of the distribution that was sampled from."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    logprobs: list[float]


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_tokens": (0, 1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
}
"""Parameters that rlcore does not have, and the values at which they do nothing: a completion has a token always."""
_OF_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize")
"""They change the text of a completion, of which only the tokens are used."""
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def sampling_params_of(given: Any) -> SamplingParams:
    """Return rlcore's parameters for those of a vLLM program (``vllm.SamplingParams``) or of an SGLang one (a dict)."""
    if isinstance(given, SamplingParams):
        return given
    known = {one.name for one in fields(SamplingParams)}
    if not isinstance(given, Mapping):  # what vLLM's class has beside these is left at its default by LightRFT
        given = {name: getattr(given, name) for name in (*known, *_NEUTRAL) if hasattr(given, name)}
    found: dict[str, Any] = {}
    for given_name, value in given.items():
        name = _NAMES.get(given_name, given_name)
        if name in known:
            found[name] = tuple(value or ()) if name == "stop_token_ids" else value
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise UnsupportedError(f"the sampling parameter {name}={value!r}", f"only {_NEUTRAL[name][0]} is")
        elif name not in _OF_TEXT:
            raise InvalidInputError(
                f"{given_name!r} is no sampling parameter here; accepted: {', '.join(sorted(known))}"
            )
    params = SamplingParams(**found)
    if params.n != 1:
        raise InvalidInputError(f"sampling_params.n must be 1, got {params.n}; repeat a prompt for several completions")
    return params
