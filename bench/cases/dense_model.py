"""Dense Qwen2 models for the cases of the train engine: shapes, a policy, and weights that nobody has to store."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.cases.language_model import qwen2_config, transformers_class
from rlcore.meta import meta_device
from rlcore.nn import HuggingFaceTrainModule

_STD = 0.02
"""Of random weights, as transformers starts them."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Of one model."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool

    def config(self) -> Any:
        """Raises MissingDependencyError without transformers."""
        return qwen2_config(self, max_position_embeddings=32_768, tie_word_embeddings=self.is_tied)

    @property
    def num_multiplied(self) -> int:
        """Parameters that take part in a product for each token: the head does, the embedding does not."""
        attention = self.hidden * self.hidden * (2 + 2 * self.kv_heads / self.heads)
        return round(self.layers * (attention + 3 * self.hidden * self.inner) + self.hidden * self.vocabulary)


QWEN_1_5B = Dense("qwen2.5-1.5b", 1536, 8960, 28, 12, 2, 151_936, is_tied=True)
QWEN_7B = Dense("qwen2.5-7b", 3584, 18_944, 28, 28, 4, 152_064, is_tied=False)
TINY = Dense("qwen2-tiny", 128, 512, 2, 2, 2, 512, is_tied=True)
"""Where the device is a host."""


class _Drawn:
    """One tensor, whose elements are drawn when they are read; equal for everybody who reads it."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device_type: str) -> None:
        self._name, self._shape, self._dtype, self._device_type = name, shape, dtype, device_type

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, box: Any) -> Tensor:
        at: dict[str, Any] = {"device": self._device_type, "dtype": self._dtype}
        if self._name.endswith("norm.weight"):
            return torch.ones(self._shape, **at)[box]
        if self._name.endswith("bias"):
            return torch.zeros(self._shape, **at)[box]
        generator = torch.Generator(self._device_type).manual_seed(zlib.crc32(self._name.encode()))
        return torch.empty(self._shape, **at).normal_(std=_STD, generator=generator)[box]


class Drawn(Mapping[str, Any]):
    """Weights of every parameter of a module, to be read a slice at a time as from a file."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype, device_type: str) -> None:
        self._drawn = {
            name: _Drawn(name, tuple(parameter.shape), dtype, device_type)
            for name, parameter in module.named_parameters()
        }

    def __getitem__(self, name: str) -> Any:
        return self._drawn[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._drawn)

    def __len__(self) -> int:
        return len(self._drawn)


def policy_class() -> Any:
    """Raises MissingDependencyError without transformers."""

    class Policy(HuggingFaceTrainModule, transformers_class("Qwen2ForCausalLM")):  # type: ignore[misc]
        """Learns by AdamW; ``weights`` is the folder that they are read from, or the dtype that they are drawn in."""

        weights: Path | torch.dtype
        device_type: str

        def materialization_source(self) -> Any:
            weights = self.weights
            return weights if isinstance(weights, Path) else Drawn(self, weights, self.device_type)

        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-6, fused=True)

        def reset_peak(self) -> None:
            if torch.accelerator.is_available():
                torch.accelerator.reset_peak_memory_stats()

    return Policy


def policy(dense: Dense, weights: Path | torch.dtype, device_type: str, cls: Any = None) -> Any:
    """One on the meta device, of ``policy_class()`` or of a class that was derived from it."""
    with meta_device():
        made = (cls or policy_class())._from_config(dense.config())
    made.weights, made.device_type = weights, device_type
    return made
