"""The weights of one vLLM worker, as a weight sync writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from rlcore._torch_private import storage_key
from rlcore.device import Device
from rlcore.engines.offload.storages import distinct_storages
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.engines.sampling.replica.engine_identity import engine_identity
from rlcore.engines.sampling.replica.strays import strays
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.interfaces import VllmConfig
from rlcore.engines.sampling.vllm.meta_model import meta_model
from rlcore.engines.sampling.vllm.quantized import quantized_matrices
from rlcore.engines.weight_sync.target import LoadWeights, Target, Weights
from rlcore.errors import CheckpointError
from rlcore.kernels.strided_copy.quantized import QuantizedMatrices
from rlcore.weights.source import WeightSource, in_files, on_meta

_PACKAGES = ("vllm", "vllm-ascend")
VARIABLES = ("VLLM_", "FLASHINFER_", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


class VllmTarget(Target):
    """The weights of a live vLLM model; ``device`` is the rlcore device that it is on."""

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, device: Device) -> None:
        self.device = device
        self._vllm_config = vllm_config
        self._model: Any = model
        self._tensors: dict[str, Tensor] = {}
        self._quantized: dict[str, QuantizedMatrices] | None = None
        self._is_reloading = False

    def meta_model(self) -> tuple[nn.Module, LoadWeights]:
        return meta_model(self._vllm_config, is_plain=bool(self.quantized()))

    def quantized(self) -> Mapping[str, QuantizedMatrices]:
        """Return the live matrices, kept from the first call on as the tensors are."""
        if self._quantized is None:
            self._quantized = quantized_matrices(self._model, self._vllm_config.model_config.dtype)
        return self._quantized

    def identity(self) -> str:
        return engine_identity(self._model, self.device, packages=_PACKAGES, variables=VARIABLES)

    def checkpoint(self) -> dict[str, Tensor] | None:
        """Return the weights of the model's folder, on meta; None if vLLM has a name, or files of another kind."""
        try:
            return on_meta(self.first_weights())
        except CheckpointError:
            return None

    def first_weights(self) -> WeightSource:
        """Return the weights that vLLM has loaded first.

        Raises:
            CheckpointError: vLLM has a name and no folder, or files of another kind.
        """
        return in_files(check_model_folder(self._vllm_config.model_config.model).weight_files)

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors, kept from the first call on: a reload takes them out of the model for a while."""
        if not self._tensors:
            self._tensors = dict(self._plain())
        return self._tensors

    def _plain(self) -> Iterator[tuple[str, Tensor]]:
        derived = {name.rpartition(".")[0] for name, _ in self.strays()}
        for prefix, module in self._model.named_modules():
            if prefix not in derived:
                own: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
                own |= module.named_buffers(recurse=False)
                for name, tensor in own.items():
                    yield (f"{prefix}.{name}" if prefix else name), tensor.detach()

    def strays(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the model that are neither parameters nor buffers nor KV cache, by name."""
        layer_caches = versions.layer_caches(self._vllm_config.compilation_config)
        caches = {storage_key(storage) for storage in distinct_storages(layer_caches)}
        for name, tensor in strays(self._model, self.device):
            if storage_key(tensor.untyped_storage()) not in caches:
                yield name, tensor

    def reload(self, weights: Weights) -> None:
        with nullcontext() if self._is_reloading else self.reloading():
            self._model.load_weights(weights)

    @contextmanager
    def reloading(self) -> Iterator[None]:
        self.tensors()
        self._is_reloading = True
        try:
            with versions.reloading(self._model, self._vllm_config):
                yield
        finally:
            self._is_reloading = False

    def committed(self, version: int) -> None:
        """Do nothing: the replica drops what was computed with earlier weights."""
