"""Sampling parameters: vLLM's field names and meanings, checked when made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlcore.arguments import did_you_mean
from rlcore.errors import InvalidInputError

MIN_TEMPERATURE = 0.01  # vLLM's bound too: below it, logits divided by the temperature overflow in half precision
_INT64 = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters of the completions of one prompt."""

    n: int = 1
    """Number of completions a prompt."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens whose probabilities come to this sum, in (0, 1]; 1 means all."""
    top_k: int = -1
    """Sample among this many likeliest tokens; -1 or 0 means all."""
    max_tokens: int = 16
    """Number of new tokens at which a completion ends."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """The model's own end-of-sequence tokens do not end a completion."""
    seed: int | None = None
    """The same prompt, seed and sample index give the same random numbers, whatever they are batched with.

    None draws one for each prompt from torch's default generator.
    """

    def __post_init__(self) -> None:
        for name in ("n", "top_k", "max_tokens"):
            self._require(name, _is_int(getattr(self, name)), "an int")
        for name in ("temperature", "top_p"):
            self._require(name, _is_finite(getattr(self, name)), "a finite number")
        self._require("n", self.n >= 1, "at least 1")
        self._require(
            "temperature",
            self.temperature == 0 or self.temperature >= MIN_TEMPERATURE,
            f"0 (greedy) or at least {MIN_TEMPERATURE}",
        )
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._require("top_k", self.top_k >= -1, "at least 1, or -1 or 0 for all tokens")
        self._require("max_tokens", self.max_tokens >= 1, "at least 1")
        self._require("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        seed = self.seed
        is_seed = seed is None or (_is_int(seed) and -_INT64 <= seed < _INT64)
        self._require("seed", is_seed, "None or an int in [-2**63, 2**63)")
        if self.is_greedy and self.n > 1:
            raise InvalidInputError(
                f"SamplingParams.n must be 1 when temperature is 0, got {self.n}: they would all be equal"
            )
        self._keep_stop_token_ids_as_tuple()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def restricts_tokens(self) -> bool:
        """True if top-k or top-p leaves some tokens out."""
        return not self.is_greedy and (self.top_p < 1 or self.top_k > 0)

    @classmethod
    def of(cls, value: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """Return parameters as they are, those of a mapping of field names, or the defaults for None.

        Raises:
            InvalidInputError: an unknown key (names the nearest), a value out of range, or a wrong type.
        """
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            kind = type(value)  # vLLM's has the same name
            raise InvalidInputError(
                "sampling parameters must be a mapping, None or rlcore's own SamplingParams, "
                f"got {kind.__module__}.{kind.__qualname__}"
            )
        names = [field.name for field in fields(cls)]
        for key in value:
            if key not in names:
                hint = did_you_mean(str(key), names)
                raise InvalidInputError(f"unknown sampling parameter {key!r}{hint or ';'} accepted: {', '.join(names)}")
        return cls(**value)

    def _require(self, name: str, holds: bool, accepted: str) -> None:
        if not holds:
            raise InvalidInputError(f"SamplingParams.{name} must be {accepted}, got {getattr(self, name)!r}")

    def _keep_stop_token_ids_as_tuple(self) -> None:
        ids = self.stop_token_ids
        are_ids = isinstance(ids, (list, tuple, set, frozenset)) and all(_is_int(i) and i >= 0 for i in ids)
        self._require("stop_token_ids", are_ids, "token ids, each at least 0")
        object.__setattr__(self, "stop_token_ids", tuple(ids))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
