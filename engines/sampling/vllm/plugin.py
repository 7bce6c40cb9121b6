"""The entry point of rlcore in the group ``vllm.general_plugins``: vLLM calls it in each of its processes."""

from __future__ import annotations

from rlcore.engines.sampling.vllm import versions
from rlcore.settings import Settings


def register() -> None:
    """Make ``weight_transfer_config={"backend": "rlcore_ipc"}`` known. Its code is imported at first use."""
    if Settings.from_env().vllm_plain_weights:
        versions.keep_weights_plain()
    versions.register_weight_transfer(
        "rlcore_ipc", "rlcore.engines.sampling.vllm.transfer", "RlcoreWeightTransferEngine"
    )
