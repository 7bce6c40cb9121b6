"""The warning about a step whose tokens have other log-probabilities in the trainer than they had in the sampler."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from rlcore.engines.executors.mismatch import MISMATCH
from rlcore.routing.routers import ROUTES, routers_of

LEAST_SAMPLE_SIZE = 0.9
"""Below this share of tokens the importance weights are worth telling of. Log-ratios of a normal distribution reach it
at a standard deviation of 0.32."""
_ONE_SIDED, _LEAST_SHIFT = 0.9, 0.02


def mismatch_warning(metrics: Mapping[str, float], packed: Mapping[str, Tensor], module: nn.Module) -> str | None:
    """Return a warning that names the likely cause; None if the step has no mismatch to tell of."""
    size = metrics.get(f"{MISMATCH}effective_sample_size", 1.0)
    if size >= LEAST_SAMPLE_SIZE and not _is_one_sided(metrics):
        return None
    mean, p99 = (metrics[f"{MISMATCH}{name}"] for name in ("mean", "p99"))
    return (
        f"the trainer's log-probs differ from the sampler's by {mean:.3g} in the mean, {p99:.3g} at the 99th "
        f"percentile: the batch is worth {size:.0%} of its tokens. Likely cause: {_cause(metrics, packed, module)}. "
        "`rlcore parity` finds where the two differ"
    )


def _is_one_sided(metrics: Mapping[str, float]) -> bool:
    """Return True if the trainer's are lower for nearly all tokens: weights of 0.9 are worth all tokens, and biased."""
    mean, bias = (metrics.get(f"{MISMATCH}{name}", 0.0) for name in ("mean", "bias"))
    return mean > _LEAST_SHIFT and bias < -_ONE_SIDED * mean


def _cause(metrics: Mapping[str, float], packed: Mapping[str, Tensor], module: nn.Module) -> str:
    if _is_one_sided(metrics):
        return (
            "nearly all of the trainer's are lower, as where the sampler restricts tokens by top_p or top_k; sample "
            "from the whole distribution"
        )
    if "versions" in packed:
        sampled = packed["versions"][packed["versions"] >= 0]
        if len(sampled) and int(sampled.min()) < int(sampled.max()):
            return (
                f"the tokens were sampled from versions {int(sampled.min())} to {int(sampled.max())} of the weights; "
                "bound the staleness, or use decoupled_ppo"
            )
    if ROUTES not in packed and routers_of(module):
        return (
            "tokens go to other experts than in the sampler; build it with enable_return_routed_experts=True, and the "
            "trainer replays them"
        )
    return (
        "the policy has moved since the tokens were sampled, the temperatures differ, or one of the two computes in "
        "fewer bits"
    )
