"""The hardware layer under RL post-training: devices, kernels, engines, offload and weight transfer.

Importing this loads nothing else; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib

__version__ = "0.2.0"

TYPE_CHECKING = False  # type checkers take the name for true; importing typing takes as long as Python takes to start

if TYPE_CHECKING:
    from typing import Any

    from rlcore.engines.batch import collate as collate
    from rlcore.engines.inference import InferenceEngine as InferenceEngine
    from rlcore.engines.need_parallel import NeedParallel as NeedParallel
    from rlcore.engines.offload.standalone import Offloader as Offloader
    from rlcore.engines.offload.standalone import offloaded as offloaded
    from rlcore.engines.runtime import init as init
    from rlcore.engines.sampling.completion import RequestOutput as RequestOutput
    from rlcore.engines.swapping.swap import swap as swap
    from rlcore.engines.train import TrainEngine as TrainEngine
    from rlcore.engines.weight_sync.api import WeightReceiver as WeightReceiver
    from rlcore.engines.weight_sync.api import WeightSender as WeightSender
    from rlcore.engines.weight_sync.channels.connections import accept_controls as accept_controls
    from rlcore.engines.weight_sync.channels.connections import connect_control as connect_control
    from rlcore.engines.weight_sync.channels.control import Control as Control
    from rlcore.errors import RlcoreError as RlcoreError
    from rlcore.hookspecs import hookimpl as hookimpl
    from rlcore.meta import meta_device as meta_device
    from rlcore.planning.plan import plan as plan
    from rlcore.registry import get_device as get_device
    from rlcore.registry import list_devices as list_devices
    from rlcore.sequence_input import SequenceInput as SequenceInput
    from rlcore.spans import span as span
    from rlcore.types import DeviceSpec as DeviceSpec

_HOME = {
    "Control": "rlcore.engines.weight_sync.channels.control",
    "DeviceSpec": "rlcore.types",
    "InferenceEngine": "rlcore.engines.inference",
    "NeedParallel": "rlcore.engines.need_parallel",
    "Offloader": "rlcore.engines.offload.standalone",
    "RequestOutput": "rlcore.engines.sampling.completion",
    "RlcoreError": "rlcore.errors",
    "SequenceInput": "rlcore.sequence_input",
    "TrainEngine": "rlcore.engines.train",
    "WeightReceiver": "rlcore.engines.weight_sync.api",
    "WeightSender": "rlcore.engines.weight_sync.api",
    "accept_controls": "rlcore.engines.weight_sync.channels.connections",
    "collate": "rlcore.engines.batch",
    "connect_control": "rlcore.engines.weight_sync.channels.connections",
    "get_device": "rlcore.registry",
    "hookimpl": "rlcore.hookspecs",
    "init": "rlcore.engines.runtime",
    "list_devices": "rlcore.registry",
    "meta_device": "rlcore.meta",
    "offloaded": "rlcore.engines.offload.standalone",
    "plan": "rlcore.planning.plan",
    "span": "rlcore.spans",
    "swap": "rlcore.engines.swapping.swap",
}

_NEEDS_NO_TORCH = ("rlcore.errors", "rlcore.hookspecs", "rlcore.registry", "rlcore.spans", "rlcore.types")

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlcore' has no attribute {name!r}")
    if _HOME[name] not in _NEEDS_NO_TORCH:
        importlib.import_module("rlcore.torch_import").import_torch()
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
