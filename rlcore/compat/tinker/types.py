"""The values that a program gives to the clients and gets from them, with Tinker's names and defaults."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from rlcore.arguments import AT_LEAST_0, NUMBER, Kind, plain_number
from rlcore.errors import InvalidInputError

StopReason = Literal["length", "stop"]
_DTYPES: dict[str, Any] = {"int64": torch.int64, "float32": torch.float32}
_BETA = Kind(f"{AT_LEAST_0.words} below 1", lambda value: AT_LEAST_0.has(value) and value < 1)
_CLIP = Kind("a number of at least 0 (0 or infinity: no clipping)", lambda value: NUMBER.has(value) and value >= 0)
_ADAM = {"beta1": _BETA, "beta2": _BETA, "grad_clip_norm": _CLIP}
"""The kinds of AdamW's parameters; of the others AT_LEAST_0."""


@dataclass(frozen=True, eq=False)
class TensorData:
    """A tensor as plain numbers."""

    data: Sequence[float]
    dtype: Literal["int64", "float32"]
    shape: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise InvalidInputError(f"TensorData.dtype must be one of {', '.join(_DTYPES)}; got {self.dtype!r}")
        if self.shape is not None and math.prod(self.shape) != len(self.data):
            raise InvalidInputError(f"TensorData of shape {list(self.shape)} cannot have {len(self.data)} numbers")

    @classmethod
    def from_torch(cls, tensor: Tensor) -> Self:
        dtype: Literal["int64", "float32"] = "float32" if tensor.is_floating_point() else "int64"
        return cls(tensor.detach().cpu().to(_DTYPES[dtype]).flatten().tolist(), dtype, list(tensor.shape))

    @classmethod
    def from_numpy(cls, array: np.ndarray[Any, Any]) -> Self:
        return cls.from_torch(torch.from_numpy(np.ascontiguousarray(array)))

    def to_torch(self) -> Tensor:
        tensor = torch.tensor(self.data, dtype=_DTYPES[self.dtype])
        return tensor if self.shape is None else tensor.reshape(tuple(self.shape))

    def to_numpy(self) -> np.ndarray[Any, Any]:
        return self.to_torch().numpy()

    def tolist(self) -> list[Any]:
        found: list[Any] = self.to_torch().tolist()
        return found


@dataclass(frozen=True)
class EncodedTextChunk:
    """A run of token ids."""

    tokens: Sequence[int]
    type: str = "encoded_text"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _token_ids(self.tokens))

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class ModelInput:
    """The tokens that a model reads."""

    chunks: list[EncodedTextChunk]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> Self:
        return cls([EncodedTextChunk(tokens)])

    @classmethod
    def empty(cls) -> Self:
        return cls([])

    def to_ints(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: EncodedTextChunk) -> ModelInput:
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk([token]))


@dataclass(frozen=True)
class Datum:
    """One sequence, and what its loss reads: tensors, arrays or lists with one entry for each token of the input.

    ``loss_fn_inputs["target_tokens"][t]`` is predicted after ``model_input`` up to t: targets are shifted by one.
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model_input, ModelInput) or not isinstance(self.loss_fn_inputs, Mapping):
            raise InvalidInputError(
                f"a Datum takes a ModelInput and a mapping, got {self.model_input!r:.50}, {self.loss_fn_inputs!r:.50}"
            )
        found = {name: _tensor_data(name, value) for name, value in self.loss_fn_inputs.items()}
        object.__setattr__(self, "loss_fn_inputs", found)


@dataclass(frozen=True)
class AdamParams:
    """AdamW's parameters for one step; no clipping where ``grad_clip_norm`` is 0 or infinite."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kind, number = _ADAM.get(name, AT_LEAST_0), plain_number(value)
            if not kind.has(number):
                raise InvalidInputError(f"AdamParams.{name} must be {kind.words}, got {value!r}")
            object.__setattr__(self, name, number)


@dataclass(frozen=True)
class TinkerSamplingParams:
    """How completions are sampled. ``stop`` None means the model's own end tokens; a list of ids, these alone."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


SamplingParams = TinkerSamplingParams


@dataclass(frozen=True)
class SampledSequence:
    """One completion."""

    stop_reason: StopReason
    sequence_id: str
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class SampleResponse:
    """The completions of a prompt."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: list[float | None] | None = None


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """``loss_fn_outputs`` has a mapping for each datum, with its ``logprobs``."""

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimStepResponse:
    metrics: dict[str, float]


@dataclass(frozen=True)
class SaveWeightsResponse:
    path: str


@dataclass(frozen=True)
class LoadWeightsResponse:
    path: str


SaveWeightsForSamplerResponse = SaveWeightsResponse


@dataclass(frozen=True)
class ModelData:
    model_name: str


@dataclass(frozen=True)
class GetInfoResponse:
    model_data: ModelData
    is_lora: bool
    lora_rank: int
    model_name: str


def _token_ids(tokens: Any) -> list[int]:
    given = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    with contextlib.suppress(TypeError):
        found = [*map(operator.index, given)]
        if min(found, default=0) >= 0 and bool not in map(type, given):  # such as a mask
            return found
    raise InvalidInputError(f"ModelInput takes whole numbers of at least 0, got {tokens!r:.100}")


def _tensor_data(name: str, value: Any) -> TensorData:
    if isinstance(value, TensorData):
        return value
    if isinstance(value, ModelInput):
        value = value.to_ints()
    if isinstance(value, np.ndarray):
        return TensorData.from_numpy(value)
    try:
        tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"loss_fn_inputs[{name!r}] must be numbers, got {value!r:.100}") from error
    if name != "target_tokens" and not isinstance(value, Tensor):
        tensor = tensor.float()
    return TensorData.from_torch(tensor)
