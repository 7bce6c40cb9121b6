"""What a loss is: any plain PyTorch function of log-probabilities.

    value, stats = loss_fn(logprob, entropy, per_token)

All are [t] vectors, t the tokens of one chunk: ``logprob`` and ``entropy`` (None if not computed),
``per_token`` what the caller passed (old log-probabilities, advantages, ...), ``value`` the loss of each
token before weighting, and ``stats`` vectors to report, reduced over all tokens by the ending of their name:
``_mean`` (weighted like the loss), ``_sum``, ``_min``, ``_max``. A masked token's entries are 0, and whatever
is computed from them is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from rlcore.errors import InvalidInputError

LossFn = Callable[[Tensor, Tensor | None, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


@final
@dataclass(frozen=True)
class sequence_level:  # noqa: N801 (a decorator)
    """Marks a loss that needs whole sequences: ``@sequence_level``.

    Its chunks end where sequences end, and ``per_token`` also holds ``cu_seqlens`` [n + 1] int64, the
    boundaries of the n sequences in the chunk, and ``token_mask`` [t] bool, False for tokens that do not
    count.
    """

    function: LossFn

    def __call__(
        self, logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.function(logprob, entropy, per_token)


def needed(per_token: Mapping[str, Tensor], name: str, loss: str) -> Tensor:
    """``per_token[name]``, or an error that says which loss wants it."""
    if name not in per_token:
        raise InvalidInputError(f"{loss} needs per_token[{name!r}]; got {sorted(per_token) or 'nothing'}")
    return per_token[name]
