"""The sum of several loss terms."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import LossFn, sequence_level


def combine(*terms: LossFn) -> LossFn:
    """A loss whose value is the sum of the terms' values, with all their statistics.

    It is sequence level if one of the terms is.

    Raises:
        InvalidInputError: no term; or, when run, two terms with a statistic of the same name.
    """
    if not terms:
        raise InvalidInputError("combine needs at least one loss term")

    def combined(
        logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        value, stats = terms[0](logprob, entropy, per_token)
        stats = dict(stats)
        for term in terms[1:]:
            more, new = term(logprob, entropy, per_token)
            clash = sorted(stats.keys() & new.keys())
            if clash:
                raise InvalidInputError(f"combine: two terms report {', '.join(clash)}; rename one of them")
            value = value + more
            stats |= new
        return value, stats

    return sequence_level(combined) if any(isinstance(term, sequence_level) for term in terms) else combined
