"""The sum of several loss terms."""

from __future__ import annotations

from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LOSS, LossFn, PerToken, TermOutput, as_level_of, joined_statistics


def combine(*terms: LossFn) -> LossFn:
    """Return a loss whose value is the sum of the terms' values, with all their statistics.

    It is sequence level if one of the terms is.

    Raises:
        InvalidInputError: no term; or, when run, two terms with a statistic of the same name.
    """
    if not terms:
        raise InvalidInputError("combine needs at least one loss term")
    for place, term in enumerate(terms):
        if not LOSS.has(term):
            raise InvalidInputError(f"combine takes {LOSS.words} as term {place}, got {term!r}")

    def combined(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        value, stats = terms[0](logprob, entropy, per_token)
        for term in terms[1:]:
            more, new = term(logprob, entropy, per_token)
            value, stats = value + more, joined_statistics(stats, new, "combine")
        return value, stats

    return as_level_of(combined, *terms)
