"""Stand-ins for the cases beside other libraries, where the package was installed without those."""

from __future__ import annotations

from rlcore.bench.case import Case, Work
from rlcore.device import Device
from rlcore.errors import UnsupportedError

_HOW = "they need a clone of the repository, installed by pip install -e . in it: the wheel leaves them out"


def _prepare(device: Device) -> Work:
    raise UnsupportedError("a case beside other libraries in this installation", _HOW)


cases = (
    Case("kernels/peers", f"other libraries' operators beside those of the cases kernels/...: {_HOW}", _prepare),
    Case("weight_sync/vllm", f"new weights for real vLLM, and the turn around it: {_HOW}", _prepare),
)
