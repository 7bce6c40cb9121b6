"""One tensor-parallel shard of a replica, in the process that has its device: moves and loads weights and KV cache."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from rlcore.activations import recording
from rlcore.device import Device
from rlcore.engines.offload.group import OffloadGroup
from rlcore.engines.offload.host_arena import reserve_host_memory
from rlcore.engines.residency import Move
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.engines.sampling.replica.reloads import differing_after_reload
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.target import Target
from rlcore.tensor_tree import tensor_to_bytes
from rlcore.types import OffloadReport
from rlcore.weights.source import in_files


class ReplicaShard(ABC):
    """The model is loaded and the KV cache allocated before it is made. A subclass sets the groups of its tags."""

    _offload_groups: dict[str, OffloadGroup]

    def __init__(self, target: Target) -> None:
        self.device: Device = target.device
        self._target: Any = target
        self.receiver = Receiver(target)

    @abstractmethod
    def _kv_cache_is_back(self) -> None:
        """Make zeros of a KV cache whose memory has come back."""

    def move(self, move: str, tag: str) -> tuple[OffloadReport, bool]:
        """Move a tag. The KV cache is never copied: its contents are lost, and it comes back as zeros.

        Returns:
            The report, and True if the tag is away now.
        """
        group = self._offload_groups[tag]
        if move == Move.ONLOAD:
            was_away = group.is_away
            report = group.onload()
            if tag == "kv_cache" and was_away:
                self._kv_cache_is_back()
        else:
            is_copied = move == Move.OFFLOAD and tag == "weights"
            report = group.offload() if is_copied else group.meta()
            if tag == "weights" and not is_copied:
                self.receiver.lose_weights()
        return report, group.is_away

    def reserve(self, host_memory_bytes: int | None, reserve_host_bytes: int | None) -> None:
        reserve_host_memory(self.device, host_memory_bytes, reserve_host_bytes)

    def memory(self) -> dict[str, Any]:
        memory = self.device.memory
        return {
            "tags": {
                tag: {"device_bytes": group.device_bytes, "host_bytes": group.host_bytes}
                for tag, group in self._offload_groups.items()
            },
            "stats": dataclasses.asdict(memory.stats()),
            "info": dataclasses.asdict(memory.info()),
        }

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The live model."""

    def watch_activations(self) -> None:
        """Keep what each part of the model computes at its last call, until ``watched_activations``."""
        self._watching = contextlib.ExitStack()
        self._activations = self._watching.enter_context(recording(self.model))

    def watched_activations(self) -> dict[str, bytes]:
        """Return the tensors as bytes, and watch no longer."""
        self._watching.close()
        found, self._activations = self._activations, {}
        return {name: tensor_to_bytes(value) for name, value in found.items()}

    def reload(self, path: str) -> None:
        """Load a model folder into the live model as its engine does, with the processing after loading."""
        found = in_files(check_model_folder(path).weight_files)
        with self._target.reloading():
            self._target.reload((name, tensor.read(())) for name, tensor in found.items())
        self.device.synchronize()
        self.receiver.reloaded()

    def differing_after_reload(self, path: str) -> list[str]:
        """Return the tensors that a reload of the model's own folder changes."""
        return differing_after_reload(self._target, in_files(check_model_folder(path).weight_files))

    def is_whole(self) -> bool:
        """Return True if all weights are of one version."""
        return self.receiver.is_whole
