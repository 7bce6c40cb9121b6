"""Requests and outputs of LightRFT's rollouts, to and from rlcore's."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from rlcore.arguments import WHOLE, optional
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
    "stop": (None, "", [], ()),
}
"""Parameters that rlcore does not have, and the values at which they do nothing: a completion has a token always."""
_OF_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize")
"""They change the text of a completion, of which only the tokens are used."""
_TRUNCATION = "truncate_prompt_tokens"
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_KNOWN = tuple(one.name for one in fields(SamplingParams))


def sampling_params_of(given: Any) -> SamplingParams:
    """Return rlcore's parameters for those of a vLLM program (``vllm.SamplingParams``) or of an SGLang one (a dict)."""
    params = given if isinstance(given, SamplingParams) else SamplingParams(**_translated(_given_fields(given)))
    if params.n != 1:
        raise InvalidInputError(f"sampling_params.n must be 1, got {params.n}; repeat a prompt for several completions")
    return params


def prompts_of(given: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return prompts, each without what vLLM's ``truncate_prompt_tokens`` cuts off before its last tokens."""
    most = None if isinstance(given, SamplingParams) else _given_fields(given).get(_TRUNCATION)
    if not optional(WHOLE).has(most):
        raise InvalidInputError(f"{_TRUNCATION} must be a whole number, or None; got {most!r}")
    return [one[-max(most or 0, 0) :] for one in token_lists(prompts)]  # -1 is the model's own limit


def token_lists(prompts: Any) -> list[list[int]]:
    """Return the token ids of each prompt: of lists, arrays or tensors.

    Raises:
        InvalidInputError: a prompt is something else, such as a text.
    """
    try:
        return [[operator.index(token) for token in one] for one in prompts]
    except TypeError as error:
        raise InvalidInputError(
            f"prompt_token_ids takes a list of token ids for each prompt, got {prompts!r:.200}"
        ) from error


def _given_fields(given: Any) -> Mapping[str, Any]:
    """Return the parameters of a dict or an object, by its names; of an object, without those it has at its defaults.

    Those that mean something here are always there: their defaults are not rlcore's.
    """
    if given is None or isinstance(given, Mapping):
        return given or {}
    kind, meant = type(given), (*_KNOWN, *_NAMES)
    own: Sequence[str] = getattr(kind, "__struct_fields__", None) or [*getattr(given, "__dict__", ())]  # vLLM's, others
    names = [name for name in (*meant, *_NEUTRAL, _TRUNCATION) if hasattr(given, name)]
    if not (own or names):
        raise InvalidInputError(f"sampling_params must be a dict or an object such as vLLM's, got {given!r:.100}")
    default = None
    with contextlib.suppress(TypeError):  # a class without defaults
        default = kind()
    found = {name: getattr(given, name) for name in (*own, *names) if not name.startswith("_")}
    return {
        name: value
        for name, value in found.items()
        if name in meant or not hasattr(default, name) or value != getattr(default, name)
    }


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for given_name, value in given.items():
        name = _NAMES.get(given_name, given_name)
        if name in found:
            raise InvalidInputError(f"sampling_params have {name!r} by two names; give one")
        if name in _KNOWN:
            found[name] = () if name == "stop_token_ids" and value is None else value
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise UnsupportedError(f"the sampling parameter {name}={value!r}", f"only {_NEUTRAL[name][0]} is")
        elif name not in (*_OF_TEXT, "logprobs", _TRUNCATION):
            raise InvalidInputError(
                f"{given_name!r} is no sampling parameter here; accepted: {', '.join(sorted(_KNOWN))}"
            )
    return found
