"""LoRA adapters of a trainer for a vLLM that keeps the base model: only they are sent, under a number that counts up.

versions = AdapterVersions(policy)                       # in the trainer, on all ranks
version = versions.publish()                             # after a step
llm.generate(prompts, params, lora_request=version.request())     # or LoRARequest(*version), in another process

Nothing is merged, and vLLM takes each version by a request of its own: from a folder of peft's files, in memory where
the runtime folder is. A version's name is part of vLLM's cache keys, so that no cache has to be reset, and requests
under way end with the version that they began with.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from rlcore.arguments import COUNT, PATH, kind_of, optional, takes
from rlcore.engines.launchers.runtime_files import StoreFolder
from rlcore.engines.sampling.vllm import versions
from rlcore.errors import CheckpointError, InvalidInputError, UnsupportedError
from rlcore.weights.adapters import adapted_layers, adapter_names
from rlcore.weights.view import whole

_PREFIX = "base_model.model."
"""The prefix of each name in the files of peft."""


class AdapterVersion(NamedTuple):
    """One version of the adapters; the fields are the first three of vLLM's ``LoRARequest``."""

    name: str
    number: int
    """From 1 on."""
    path: str
    """A folder of peft's files."""

    def request(self) -> Any:
        """Return vLLM's ``LoRARequest``, where vLLM is installed."""
        return versions.lora_request(self.name, self.number, self.path)


class AdapterVersions:
    """Writes the adapters of a model, version after version.

    Args:
        model: of transformers, with LoRA adapters of peft in or around it, sharded by FSDP2 or not. Where there is a
            default torch.distributed group, all of its ranks make this object and publish together.
        name: what the names of versions begin with: one for each trainer that gives to the same vLLM.
        folder: where versions are written, for vLLM on other machines: one that all have. None: a folder of this
            machine that goes with this object.
        keep: how many versions stay there. vLLM reads one when it is first asked for, and again where it has dropped it
            for others (``max_cpu_loras``).

    Raises:
        InvalidInputError: the model has no adapters.
        UnsupportedError: several are active, they are not LoRA's, or parameters beside them are trained, which vLLM
            would not get.
    """

    @takes("AdapterVersions", model=kind_of("a torch.nn.Module", nn.Module), folder=optional(PATH), keep=COUNT)
    def __init__(self, model: nn.Module, *, name: str = "rlcore", folder: str | Path | None = None, keep: int = 2):
        given: Any = model
        self._model = given.get_base_model() if hasattr(given, "get_base_model") else given
        self._adapter = _checked(self._model)
        self._config = self._model.peft_config[self._adapter]
        self._own = StoreFolder() if folder is None and _rank() == 0 else None
        (found,) = _from_rank_0([str(folder) if self._own is None else self._own.path])
        self._folder, self._name, self._keep, self._number = Path(found), name, keep, 0

    def publish(self) -> AdapterVersion:
        """Write the adapters as they are now; return their version, the same on all ranks, once it can be read.

        Raises:
            CheckpointError: on all ranks, where the folder cannot be written.
        """
        tensors = _gathered(self._model, self._adapter)
        number = self._number + 1
        path = self._folder / f"{self._name}-{number}"
        problem = ""
        if _rank() == 0:
            try:
                self._write(path, tensors)
                shutil.rmtree(self._folder / f"{self._name}-{number - self._keep}", ignore_errors=True)
            except OSError as error:
                problem = f"adapters cannot be written to {path}: {error}"
        (problem,) = _from_rank_0([problem])
        if problem:
            raise CheckpointError(problem)
        self._number = number
        return AdapterVersion(path.name, number, str(path))

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        unfinished = path.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        save_file(tensors, unfinished / "adapter_model.safetensors")
        self._config.save_pretrained(str(unfinished))
        unfinished.rename(path)

    def close(self) -> None:
        """Remove the folder, unless it was given."""
        if self._own is not None:
            self._own.remove()


def _checked(model: Any) -> str:
    """Return the name of the model's one active adapter."""
    layers = adapted_layers(model)
    if not layers:
        raise InvalidInputError(f"AdapterVersions takes a model with adapters of peft; {type(model).__name__} has none")
    active: list[str] = sorted({name for layer in layers.values() for name in layer.active_adapters})
    if len(active) != 1:
        raise UnsupportedError(f"sending adapters {active} at once", "vLLM takes one a request; set_adapter() one")
    if (kind := str(model.peft_config[active[0]].peft_type.value)) != "LORA":
        raise UnsupportedError(f"sending adapters of the kind {kind}", "vLLM knows LoRA's alone")
    sent = _names(model, active[0])
    other = next((name for name, one in model.named_parameters() if one.requires_grad and name not in sent), None)
    if other is not None:
        raise UnsupportedError(
            f"sending adapters alone while {other} is trained too",
            "vLLM would keep its first values; freeze it, or sync all weights by rlcore.WeightSender",
        )
    return active[0]


def _names(model: nn.Module, adapter: str) -> dict[str, str]:
    """Return name in the model -> name in peft's files, for the parameters of one adapter."""
    return {name: f"{_PREFIX}{short}" for name, short in adapter_names(model).items() if f".{adapter}." in f"{name}."}


def _gathered(model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Return the adapters, whole and in host memory, by their names in peft's files; all ranks together."""
    own = dict(model.named_parameters())
    return {short: whole(own[name].detach()).cpu().contiguous() for name, short in _names(model, adapter).items()}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _from_rank_0(values: list[str]) -> list[str]:
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values
