"""The weights of one vLLM worker, as a weight sync writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from rlcore.engines.executors.vllm import versions
from rlcore.engines.executors.vllm.meta_model import meta_model
from rlcore.engines.sync.target import LoadWeights, Target, Weights


class VllmTarget(Target):
    """``strays`` gives what of the model only its loader makes right, and the modules that have it."""

    def __init__(
        self, worker: versions.Worker, device: Any, strays: Callable[[], Iterable[tuple[nn.Module, Tensor]]]
    ) -> None:
        self.device = device
        self._vllm_config = worker.vllm_config
        self._model: Any = worker.model_runner.get_model()
        self._strays = strays
        self._tensors: dict[str, Tensor] = {}
        self._is_reloading = False

    def meta_model(self) -> tuple[nn.Module, LoadWeights]:
        return meta_model(self._vllm_config)

    def tensors(self) -> dict[str, Tensor]:
        """Kept from the first call on: a reload takes them out of the model for a while."""
        if not self._tensors:
            self._tensors = dict(self._plain())
        return self._tensors

    def _plain(self) -> Iterator[tuple[str, Tensor]]:
        derived = {id(module) for module, _ in self._strays()}
        for prefix, module in self._model.named_modules():
            if id(module) not in derived:
                own: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
                own |= module.named_buffers(recurse=False)
                for name, tensor in own.items():
                    yield (f"{prefix}.{name}" if prefix else name), tensor.detach()

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
        """What was computed with earlier weights is the replica's, which drops it."""
