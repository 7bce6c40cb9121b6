"""Stand-ins for the cases beside other libraries, where the package was installed without those."""

from __future__ import annotations

from rlcore.bench.case import Case, Work
from rlcore.device import Device
from rlcore.errors import UnsupportedError

_HOW = "is in a clone of the repository alone (pip install -e . in it), as the wheel leaves it out"


def _prepare(device: Device) -> Work:
    raise UnsupportedError("a case beside other libraries in this installation", f"it {_HOW}")


_DESCRIPTIONS = {
    "kernels/peers": "the operators of other libraries beside those of rlcore",
    "race": "steps of GRPO from end to end, beside TRL's GRPOTrainer",
    "weight_sync/sglang": "new weights and tokens of real SGLang, beside SGLang alone",
    "weight_sync/vllm": "new weights for real vLLM, and the turn around it",
    "weight_sync/vllm_float8": "new weights for a vLLM that keeps them in float8",
}

cases = tuple(
    Case(name, f"{description}; {_HOW}", _prepare, effort="full", estimate_s=0.1)
    for name, description in _DESCRIPTIONS.items()
)
