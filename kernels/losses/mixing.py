"""The check that a loss does not mix what chunks separate: tokens, or with ``@sequence_level`` sequences.

``linear_loss`` runs a loss function chunk by chunk, and the memory budget decides where chunks end. A function that
reads other tokens, such as one that normalises advantages or sums over the batch, would give other numbers on another
device, and nobody would see why. ``RLCORE_DEBUG=1`` also runs the two halves of each chunk alone, and compares.

Letters: T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.evaluate import checked_output, loss_name
from rlcore.kernels.losses.interface import LossFn, PerToken, TermOutput, sequence_level

_OF_TOKENS = (
    "a token's {what} depends on other tokens, so it would change with the chunks; mark it with @sequence_level if it "
    "needs whole sequences, else compute such values beforehand and pass them in per_token"
)
_OF_SEQUENCES = (
    "a sequence's {what}s depend on other sequences, so they would change with the chunks; compute what needs them all "
    "beforehand and pass it in per_token"
)


def refusing_mixtures(loss_fn: LossFn) -> LossFn:
    """Return ``loss_fn`` with a check: it raises InvalidInputError where the value or a statistic of a token (or of a
    sequence) depends on the others in the chunk.

    It runs twice. What changes gradients alone, such as ``x * (x.mean() / x.mean().detach())``, is not found.
    """
    is_sequence_level = isinstance(loss_fn, sequence_level)

    @functools.wraps(loss_fn.function if isinstance(loss_fn, sequence_level) else loss_fn, updated=())
    def checked(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        value, stats = checked_output(loss_fn(logprob, entropy, per_token), logprob, loss_fn)
        whole = _vectors(value, stats)
        with torch.no_grad():
            for half, entries in _halves(per_token, len(logprob), is_sequence_level):
                alone = _vectors(*loss_fn(logprob[half], None if entropy is None else entropy[half], entries))
                for what, values in whole.items():
                    here = values[half].double()
                    if not torch.allclose(alone[what].double(), here, rtol=1e-4, atol=1e-6, equal_nan=True):
                        text = _OF_SEQUENCES if is_sequence_level else _OF_TOKENS
                        raise InvalidInputError(f"{loss_name(loss_fn)}: {text.format(what=what)}")
        return value, stats

    return sequence_level(checked) if is_sequence_level else checked


def _vectors(value: Tensor, stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"value": value} | {f"statistic {name!r}": values for name, values in stats.items()}


def _halves(
    per_token: PerToken, num_tokens: int, is_sequence_level: bool
) -> Iterator[tuple[slice, Mapping[str, Tensor]]]:
    """Yield the rows and the entries of each half, unless it is empty or has all tokens."""
    if not is_sequence_level:
        cut = num_tokens // 2
        for half in (slice(0, cut), slice(cut, num_tokens)):
            if 0 < half.stop - half.start < num_tokens:
                yield half, {name: values[half] for name, values in per_token.items()}
        return
    edges = per_token["cu_seqlens"]
    middle = (len(edges) - 1) // 2
    for edges_here in (edges[: middle + 1], edges[middle:]):
        half = slice(int(edges_here[0]), int(edges_here[-1]))
        if 0 < half.stop - half.start < num_tokens:
            entries = {name: values[half] for name, values in per_token.items() if name != "cu_seqlens"}
            yield half, {**entries, "cu_seqlens": edges_here - edges_here[0]}
