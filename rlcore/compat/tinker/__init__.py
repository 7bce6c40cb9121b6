"""Tinker's interface over rlcore's engines: a program of its cookbook's kind with the import changed.

    from rlcore.compat import tinker
    from rlcore.compat.tinker import types

Models are folders of this machine; the engines are built when the first client of a model is made. Names, defaults and
shapes of values are Tinker's (0.38). What is not there is refused by name.
"""

from rlcore.compat.tinker import types
from rlcore.compat.tinker.futures import APIFuture
from rlcore.compat.tinker.sampling_client import SamplingClient
from rlcore.compat.tinker.service_client import ServiceClient
from rlcore.compat.tinker.training_client import TrainingClient
from rlcore.compat.tinker.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)

__all__ = [
    "APIFuture",
    "AdamParams",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "ModelInput",
    "OptimStepResponse",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "TensorData",
    "TrainingClient",
    "types",
]
