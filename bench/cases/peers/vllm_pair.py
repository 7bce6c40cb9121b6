"""A trainer and a sampler on the same devices, with a model whose shapes are real and whose weights are random.

The sampler's are made up (``load_format="dummy"``), so that nothing large is written or read.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.bench import steps
from rlcore.bench.cases import models
from rlcore.bench.cases.models import ModelShape
from rlcore.bench.cases.offload import Way
from rlcore.bench.cases.peers import vllm_worker
from rlcore.bench.cases.timing import timed
from rlcore.bench.cases.workers import ask_each
from rlcore.device import Device
from rlcore.engines.inference import InferenceEngine
from rlcore.engines.train import TrainEngine
from rlcore.types import OffloadReport

TIMEOUT_S = 580.0
_FILE_BYTES = 4 << 30
"""At least: a whole large model in one file could not be mapped into the memory of a small machine."""
_KV_BYTES = 8 << 30
_KV_BYTES_ON_HOST = 1 << 24


def _tiny(shape: ModelShape) -> ModelShape:
    """Return what stands for a model where the device is a host."""
    return replace(
        shape,
        name=f"{shape.name}-tiny",
        hidden=128,
        inner=64 if shape.experts else 256,
        layers=2,
        heads=4,
        kv_heads=2,
        vocabulary=512,
        head_size=32,
        experts=min(shape.experts, 4),
    )


class Layout(NamedTuple):
    """The devices of the two sides: the trainer has the first ``shards``, the sampler the first of all."""

    shards: int = 1
    tensor_parallel: int = 1
    replicas: int = 1

    @property
    def devices(self) -> int:
        return max(self.shards, self.tensor_parallel * self.replicas)


# ------------------------------------------------------------------------------------------------ the two engines


def policy(shape: ModelShape, device_type: str) -> Any:
    """Return a trainer's module on meta; raises MissingDependencyError without transformers."""

    class NegatedPolicy(models.policy_class(shape)):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            """Make no optimizer: it learns nothing."""

        @torch.no_grad()
        def negate(self) -> None:
            """Negate all weights: the next call brings the old ones back."""
            for parameter in self.parameters():
                parameter.neg_()

        def named(self) -> list[tuple[str, Tensor]]:
            return list(self.named_weights())

    return models.policy(shape, torch.bfloat16, device_type, NegatedPolicy, dtype=torch.bfloat16)


def write_folder(module: Any, folder: Path) -> None:
    """Write a model folder whose weights take no space: all are zero, and holes in the files."""
    module.config.save_pretrained(folder)
    headers: list[dict[str, Any]] = [{}]
    end = 0
    for view in module.weight_views():
        if end >= _FILE_BYTES:
            headers.append({})
            end = 0
        begin, end = end, end + view.view.nbytes
        headers[-1][view.name] = {"dtype": "BF16", "shape": list(view.view.shape), "data_offsets": [begin, end]}
    files = [f"model-{number}.safetensors" for number in range(len(headers))]
    for file, header in zip(files, headers, strict=True):
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + max(one["data_offsets"][1] for one in header.values()))
    places = {name: file for file, header in zip(files, headers, strict=True) for name in header}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


class EnginePair:
    """A trainer and a sampler that share devices; neither is built yet."""

    def __init__(self, model: ModelShape, device: Device, executor: str) -> None:
        self.device = device
        model = _tiny(model) if device.spec.is_host else model
        self.name, self.vocabulary, self.state = model.name, model.vocabulary, 0
        self._files = tempfile.TemporaryDirectory(prefix="rlcore-bench-")
        self.folder = Path(self._files.name)
        module = policy(model, device.type)
        write_folder(module, self.folder)
        views = [view.view for view in module.weight_views()]
        self.nbytes, self.num_names = int(sum(view.nbytes for view in views)), len(views)
        self.train, self.infer = TrainEngine(module), InferenceEngine(self.folder, executor=executor)
        self.first: dict[str, float] = {}
        """Seconds of the first sync, which plans, proves and opens, of its calls, and of the one that was verified."""

    def sync_first(self) -> None:
        """Give the sampler the trainer's weights, and once more, verified."""
        steps.begin("first sync")
        report, seconds = timed(lambda: self.train.sync_weights(self.infer))
        steps.begin("verified sync")
        _, verified_s = timed(lambda: self.train.sync_weights(self.infer, verify=True))
        calls = {f"first_{name}": seconds for name, seconds in report.calls_s.items()}
        self.first = {"first_sync": seconds, "verified_sync": verified_s, **calls}

    def step(self) -> None:
        """Give the trainer new weights."""
        self.train.call("negate")
        self.state ^= 1

    def ask_each(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each replica's worker."""
        (group,) = self.infer.executors
        return ask_each(group, method, *arguments)

    def close(self) -> None:
        self.train.close()
        self.infer.close()
        self._files.cleanup()


class VllmPair(EnginePair):
    """The sampler is vLLM."""

    def __init__(self, model: ModelShape, layout: Layout, device: Device) -> None:
        vllm_worker.register()
        super().__init__(model, device, vllm_worker.EXECUTOR)
        self.layout = layout
        self.kv_bytes = _KV_BYTES_ON_HOST if device.spec.is_host else _KV_BYTES
        self.left: dict[str, tuple[float, float]] = {}
        self.moved_bytes = self.ready_bytes = 0
        """Bytes of a move of all weights, and of host memory that was ready when the build had returned."""

    def start(self) -> None:
        """Build both, and give vLLM its first weights."""
        device, layout = self.device, self.layout
        is_host = device.spec.is_host
        places = [f"{device.spec.name}:{index}" for index in range(layout.devices)]
        steps.begin("build of the engine")
        self.infer.build(
            tensor_parallel_size=layout.tensor_parallel,
            data_parallel_size=layout.replicas,
            devices=places[: layout.tensor_parallel * layout.replicas],
            # On a host, weights that vLLM reloads otherwise than it loads them are looked for, in the folder's.
            load_format="auto" if is_host else "dummy",
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=16,
            kv_cache_memory_bytes=self.kv_bytes,
            reserve_host_bytes=self.nbytes + (self.nbytes >> 5) if layout.devices == 1 else None,
            timeout_s=TIMEOUT_S,
        )
        if layout.devices == 1:
            self.left = self._leave_first()
        self.infer.meta()
        steps.begin("build of the trainer")
        self.train.build(
            data_parallel_size=layout.shards, devices=places[: layout.shards], dtype="bfloat16", timeout_s=TIMEOUT_S
        )
        self.infer.onload()
        self.sync_first()

    def _leave_first(self) -> dict[str, tuple[float, float]]:
        """Return seconds out and back: with memory of the build, with none ready, and with memory used before."""
        found = {}
        self.ready_bytes = self.ask("ready_host_bytes")
        for kind in ("reserved", "cold", "later"):
            steps.begin(f"offload, {kind}")
            if kind == "cold":
                self.ask("give_host_memory_back")
            out, back = (joined(move("weights")) for move in (self.infer.offload, self.infer.onload))
            found[kind] = out.seconds, back.seconds
        self.moved_bytes = out.nbytes
        self.infer.meta("weights")
        self.ask("give_host_memory_back")  # the trainer's weights need it as well
        self.infer.onload("weights")
        return found

    def bare_s(self, tag: str) -> tuple[float, int]:
        """Return the seconds to map the memory of a released tag of vLLM again, and its pieces."""
        found = [one for replica in self.ask_each("bare", tag) for one in replica]
        return max(seconds for seconds, _ in found), max(pieces for _, pieces in found)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the first replica's worker."""
        return self.ask_each(method, *arguments)[0]


def joined(reports: Mapping[str, list[OffloadReport]]) -> Way:
    """Join the moves of one tag: devices move side by side."""
    (of_devices,) = reports.values()
    return Way.of(of_devices, max(report.seconds for report in of_devices))
