"""A check of a vLLM of the user's own on a host, before weights are synced into it."""

from __future__ import annotations

from rlcore.engines.sampling.replica.reloads import differing_after_reload
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.target import VllmTarget
from rlcore.errors import UnsupportedError


def check_reload(target: VllmTarget) -> None:
    """Refuse packed weights: vLLM's build for the CPU packs weights as it loads them, those of experts always.

    Args:
        target: a model with the weights of its folder.

    Raises:
        UnsupportedError: a sync would not reach what vLLM generates with.
    """
    if versions.packs_weights():
        raise UnsupportedError(
            "a weight sync into vLLM's build for the CPU, as it is set",
            "it packs weights and then generates with its copies; set RLCORE_VLLM_PLAIN_WEIGHTS=1 before it starts",
        )
    if found := differing_after_reload(target, target.first_weights()):
        raise UnsupportedError(
            "a weight sync into vLLM's build for the CPU with this model",
            f"it reloads {len(found)} tensors otherwise than it first loaded them, such as {found[0]!r}",
        )
