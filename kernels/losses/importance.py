"""Importance weights for samples of another policy than the one that is trained.

A sampler computes probabilities that differ from the trainer's (other kernels, older weights). With w =
exp(old_logprob - rollout_logprob), of the token or the geometric mean of its sequence, and without gradient, each
multiplies a term's value by

    tis            clamp(w, floor, cap)           truncated importance sampling
    icepop         w if low <= w <= high else 0   IcePop, also called masked importance sampling
    sequence_mask  1 if the sequence's w is in [low, high], else 0

Only the term is weighted; ``combine`` adds penalties after that: ``combine(tis(ppo_clip()), kl(coef=0.001))``.
Token weights still count the tokens that a weight of 0 leaves out. NeMo-RL's seq-mask-tis is
``sequence_mask(tis(term, cap=math.inf), low=..., high=...)``.

The effective sample size, as a share of all tokens, is ``weight_mean ** 2 / weight_square_mean``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from rlcore.arguments import NUMBER, takes
from rlcore.errors import InvalidInputError
from rlcore.kernels.losses.interface import (
    LOSS,
    LossFn,
    PerToken,
    TermOutput,
    as_level_of,
    joined_statistics,
    needed,
    sequence_level,
)
from rlcore.kernels.losses.ratio import bounded
from rlcore.kernels.losses.sequences import sequence_mean

Level = Literal["token", "sequence"]
Weigh = Callable[[Tensor], Tensor]


@takes("tis", term=LOSS, cap=NUMBER, floor=NUMBER)
def tis(term: LossFn, *, cap: float = 2.0, floor: float = 0.0, level: Level = "token") -> LossFn:
    """Return ``term`` weighted by the clamped ratio; it reads ``old_logprobs`` and ``rollout_logprobs`` too.

    Args:
        term: a loss term.
        cap: the highest weight; infinity leaves it unbounded (the ratio still is within e^-20 and e^20).
        floor: the lowest weight.
        level: "sequence" weights all tokens of a sequence by their geometric mean; the term is then sequence level.

    Statistics: the term's, and ``tis_ratio_min tis_ratio_max`` of w, ``tis_weight_mean tis_weight_square_mean`` of
    the weight, ``tis_cut_mean``: the share of tokens whose weight is not w.
    """
    return importance_weighted("tis", term, level, clamped("tis", floor=floor, cap=cap))


@takes("icepop", term=LOSS, low=NUMBER, high=NUMBER)
def icepop(term: LossFn, *, low: float = 0.5, high: float = 5.0, level: Level = "token") -> LossFn:
    """Return ``term`` weighted by the ratio, or left out where that is not in [low, high].

    It reads ``old_logprobs`` and ``rollout_logprobs`` too.

    Args:
        term: a loss term.
        low: the lowest ratio kept.
        high: the highest ratio kept.
        level: as ``tis``.

    Statistics: as ``tis``, named ``icepop_...``.
    """
    return importance_weighted("icepop", term, level, kept_within("icepop", low=low, high=high))


@takes("sequence_mask", term=LOSS, low=NUMBER, high=NUMBER)
def sequence_mask(term: LossFn, *, low: float, high: float) -> LossFn:
    """Return ``term`` without the sequences whose geometric-mean ratio is not in [low, high]; sequence level.

    It reads ``old_logprobs`` and ``rollout_logprobs`` too.

    Args:
        term: a loss term.
        low: the lowest ratio kept.
        high: the highest ratio kept. The mean over a sequence is close to 1: 0.99 to 1.01 is wide.

    Statistics: the term's, ``sequence_mask_ratio_min sequence_mask_ratio_max`` and ``sequence_mask_cut_mean``.
    """
    kept = kept_within("sequence_mask", low=low, high=high)

    def masked_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        value, stats = term(logprob, entropy, per_token)
        ratio = _ratio("sequence_mask", per_token, "sequence")
        is_kept = kept(ratio) > 0
        new = {
            "sequence_mask_ratio_min": ratio,
            "sequence_mask_ratio_max": ratio,
            "sequence_mask_cut_mean": ~is_kept,
        }
        return value.where(is_kept, 0.0), joined_statistics(stats, new, "sequence_mask")

    return sequence_level(masked_term)


def clamped(loss: str, *, floor: float, cap: float) -> Weigh:
    _check_bounds(loss, "floor", floor, "cap", cap)
    return lambda ratio: ratio.clamp(floor, cap)


def kept_within(loss: str, *, low: float, high: float) -> Weigh:
    _check_bounds(loss, "low", low, "high", high)
    return lambda ratio: ratio.where((ratio >= low) & (ratio <= high), 0.0)


def importance_weighted(loss: str, term: LossFn, level: Level, weigh: Weigh) -> LossFn:
    if level not in ("token", "sequence"):
        raise InvalidInputError(f"{loss}: level must be one of token, sequence; got {level!r}")

    def weighted_term(logprob: Tensor, entropy: Tensor | None, per_token: PerToken) -> TermOutput:
        value, stats = term(logprob, entropy, per_token)
        ratio = _ratio(loss, per_token, level)
        weight = weigh(ratio)
        new = {
            f"{loss}_ratio_min": ratio,
            f"{loss}_ratio_max": ratio,
            f"{loss}_weight_mean": weight,
            f"{loss}_weight_square_mean": weight.square(),
            f"{loss}_cut_mean": weight != ratio,
        }
        is_kept = weight > 0  # not where it is NaN, which the product would give to the gradient
        return (weight.where(is_kept, 0.0) * value).where(is_kept, 0.0), joined_statistics(stats, new, loss)

    return sequence_level(weighted_term) if level == "sequence" else as_level_of(weighted_term, term)


def _ratio(loss: str, per_token: PerToken, level: Level) -> Tensor:
    log_ratio = needed(per_token, "old_logprobs", loss) - needed(per_token, "rollout_logprobs", loss)
    return bounded(sequence_mean(log_ratio, per_token) if level == "sequence" else log_ratio).exp()


def _check_bounds(loss: str, low_name: str, low: float, high_name: str, high: float) -> None:
    if not (0 <= low <= high and high > 0):
        raise InvalidInputError(
            f"{loss}: need 0 <= {low_name} <= {high_name} and {high_name} > 0, bounds of the ratio itself; "
            f"got {low_name}={low}, {high_name}={high}"
        )
