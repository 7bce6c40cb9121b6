"""The weights of one of SGLang's schedulers, as a weight sync writes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from rlcore.device import Device
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.engines.sampling.replica.engine_identity import engine_identity
from rlcore.engines.sampling.replica.strays import strays
from rlcore.engines.sampling.sglang import versions
from rlcore.engines.sampling.sglang.interfaces import SglangModelRunner
from rlcore.engines.weight_sync.target import LoadWeights, Target, Weights
from rlcore.errors import CheckpointError
from rlcore.weights.source import in_files, on_meta

_PACKAGES = ("sglang", "sglang-kernel", "sgl-kernel")
_VARIABLES = ("SGLANG_", "SGL_", "FLASHINFER_")


class SglangTarget(Target):
    """The weights of a live SGLang model; ``device`` is the rlcore device that it is on."""

    def __init__(self, runner: SglangModelRunner, device: Device) -> None:
        self.device = device
        self._runner = runner
        self.arguments: list[str] | None = None
        """The arguments that SGLang was made with, in words; None where nobody has said them."""

    def meta_model(self) -> tuple[nn.Module, LoadWeights]:
        model: Any = versions.meta_model(self._runner)
        return model, model.load_weights

    def checkpoint(self) -> dict[str, Tensor] | None:
        with suppress(CheckpointError):
            return on_meta(in_files(check_model_folder(self._runner.model_config.model_path).weight_files))
        return None

    def identity(self) -> str | None:
        """See the base; None where the arguments, which choose kernels, are not known."""
        if self.arguments is None:
            return None
        return engine_identity(
            self._runner.model, self.device, packages=_PACKAGES, variables=_VARIABLES, arguments=self.arguments
        )

    def tensors(self) -> dict[str, Tensor]:
        model = self._runner.model
        return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def strays(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the model that are neither parameters nor buffers, by name; no plan writes them."""
        return strays(self._runner.model, self.device)

    def reload(self, weights: Weights) -> None:
        versions.load(self._runner, weights, self.device.torch_device)

    def committed(self, version: int) -> None:
        """Do nothing: the replica drops what was computed with earlier weights."""
