"""The base of executors whose worker drives an engine of another project, on all devices of a replica.

That engine has processes of its own, one for each device, or a part of this one. In each is a ``ReplicaShard``, which
moves and loads the device's weights; the executor calls all of them at once, in between two steps of the engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol

from torch import Tensor

from rlcore.engines.executors.base import InferenceExecutor
from rlcore.engines.executors.worker import MemoryReport
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.residency import Move
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.model_folder import ModelFolder, check_model_folder
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt, PromptReader
from rlcore.engines.sampling.replica.shard import ReplicaShard
from rlcore.engines.sampling.request_queue import PauseMode
from rlcore.engines.weight_sync.planning.manifest import WeightManifest
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.errors import RlcoreError, SyncError, UnsupportedError
from rlcore.tensor_tree import tensor_from_bytes
from rlcore.types import MemoryInfo, MemoryStats, OffloadReport
from rlcore.weights.names import mismatch
from rlcore.weights.source import in_files

P = ParamSpec("P")
_SYNC, _VALUES = "a weight sync", "weights without values"
"""Reasons for which a replica makes no step."""


class Requests(Protocol):
    """The requests of a replica, which its engine runs."""

    @property
    def version(self) -> int:
        """The version of the weights in use."""

    def run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], version: int, advance: Callable[[int], None]
    ) -> list[RequestOutput]:
        """Complete these prompts; ``advance`` is called with the number of completions that ended, as they do."""

    def submit(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams], version: int
    ) -> None:
        """Begin these requests, whose outputs ``collect`` gives by these numbers (>= 0)."""

    def collect(self, timeout_s: float) -> dict[int, RequestOutput]:
        """Return what has ended; wait ``timeout_s`` for the first, unless nothing is under way or all is paused."""

    def progress(self) -> dict[int, int]:
        """Return the tokens that each request under way has so far, by its number."""

    def abort(self, numbers: Sequence[int] | None) -> int:
        """Cancel these requests, or all that were submitted; return how many were unfinished. None is collected."""

    def pause(self, mode: PauseMode) -> None:
        """Make no more steps. "abort" cancels what is under way, "wait" finishes it first, "keep" leaves it."""

    def resume(self) -> None:
        """Go on after ``pause``."""

    def hold(self, reason: str) -> None:
        """Make no step until this reason and all others are released."""

    def release(self, *reasons: str) -> None:
        """Drop reasons of ``hold``."""

    def forget_cached(self) -> None:
        """Drop all cached keys, values and encodings; requests under way compute theirs again."""

    def weights_changed(self, version: int) -> None:
        """Note the version of new weights; cached results of the old ones are dropped and computed again if needed."""

    def renumber(self, version: int) -> None:
        """Note another version of the same weights: what was computed with them holds."""


class ReplicaExecutor(InferenceExecutor):
    """Drives one replica. The engine in it knows if its weights are on the devices."""

    runs_on_many_devices: ClassVar[bool] = True
    owns_process: ClassVar[bool] = True
    drives_replica: ClassVar[bool] = True
    can_swap: ClassVar[bool] = False

    engine_name: ClassVar[str]
    """The name of the engine that it drives, as errors say it."""
    engine_version = ""
    plain_build: ClassVar[str] = ""
    """How to build it so that the parts of a model are called one by one."""

    _folder: ModelFolder
    _reader: PromptReader
    _replica: Requests

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._host_memory: tuple[int | None, int | None] | None = None
        self._differing: list[str] = []

    @abstractmethod
    def _call_each(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of the shards, or of their receivers ("receiver.begin"), with the arguments of each."""

    @property
    def _num_shards(self) -> int:
        return len(self.context.devices) or 1

    def _call(self, method: Callable[Concatenate[Any, P], Any], *args: P.args, **_: P.kwargs) -> list[Any]:
        """Call a method of every shard with the same arguments; results by rank, as msgpack has them."""
        return self._call_each(method.__name__, [args] * self._num_shards)

    def _prove_reload(self, path: str | Path) -> None:
        """Find out if a reload of the model's own folder gives the weights of the first load."""
        found = self._call(ReplicaShard.differing_after_reload, str(path))
        self._differing = sorted({name for names in found for name in names})

    # ------------------------------------------------------------------------------------------- generation

    def check_prompts(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, numbers: Sequence[int]
    ) -> list[Sequence[int]]:
        return [list(token_ids) for token_ids in self._reader.read(prompts, params, numbers)]

    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, version: int
    ) -> list[RequestOutput]:
        return self._replica.run(prompts, params, version, self.emit)

    def submit(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, version: int
    ) -> None:
        self._replica.submit(numbers, prompts, params, version)

    def collect(self, timeout_s: float, *, version: int) -> dict[int, RequestOutput]:
        return self._replica.collect(timeout_s)

    def activations(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        self._replica.forget_cached()  # else only the last token would run
        self._call(ReplicaShard.watch_activations)
        try:
            self._replica.run([list(token_ids)], [SamplingParams(max_tokens=1)], self._replica.version, lambda _: None)
        finally:
            found = self._call(ReplicaShard.watched_activations)[0]
        if not found:
            raise UnsupportedError(
                f"activations() of a compiled {self.engine_name}",
                f"its parts are not called one by one; {self.plain_build}",
            )
        return {name: tensor_from_bytes(value) for name, value in found.items()}

    def progress(self) -> dict[int, int]:
        """Return the tokens that each request under way has so far, by its number."""
        return self._replica.progress()

    def abort(self, numbers: Sequence[int] | None) -> int:
        return self._replica.abort(numbers)

    def pause(self, mode: PauseMode, *, version: int) -> None:
        self._replica.pause(mode)

    def resume(self) -> None:
        self._replica.resume()

    # -------------------------------------------------------------------------------------------- residency

    def onload(self, tag: str) -> OffloadReport:
        return self._move(Move.ONLOAD, tag)

    def offload(self, tag: str) -> OffloadReport:
        return self._move(Move.OFFLOAD, tag)

    def meta(self, tag: str) -> OffloadReport:
        return self._move(Move.META, tag)

    def _move(self, move: Move, tag: str) -> OffloadReport:
        if move is not Move.ONLOAD:
            self._replica.hold(f"its {tag}, which left the device")
            if tag == "kv_cache":
                self._replica.forget_cached()
            elif move is Move.META:
                self._replica.hold(_VALUES)
        found, is_away = zip(*self._call(ReplicaShard.move, move, tag), strict=True)
        if any(away is (move is Move.ONLOAD) for away in is_away):
            raise RlcoreError(
                f"{move.value}({tag!r}) left {sum(is_away)} of {len(is_away)} {self.engine_name} workers without it"
            )
        if move is Move.ONLOAD:
            self._replica.release(f"its {tag}, which left the device")
        return OffloadReport(
            moved_bytes=sum(report["moved_bytes"] for report in found),
            freed_device_bytes=sum(report["freed_device_bytes"] for report in found),
            seconds=max(report["seconds"] for report in found),
            pinned=all(report["pinned"] for report in found),
            first_use=any(report["first_use"] for report in found),
        )

    def memory_report(self) -> MemoryReport:
        """Return one report for all devices of the replica together."""
        found = self._call(ReplicaShard.memory)

        def total(*path: str) -> int:
            values: list[Any] = found
            for name in path:
                values = [value[name] for value in values]
            return sum(values)

        return {
            "device": ", ".join(self.context.devices),
            "tags": {
                tag: {key: total("tags", tag, key) for key in ("device_bytes", "host_bytes")}  # type: ignore[misc]
                for tag in found[0]["tags"]
            },
            "stats": MemoryStats(**{key: total("stats", key) for key in found[0]["stats"]}),
            "info": MemoryInfo(**{key: total("info", key) for key in found[0]["info"]}),
        }

    # ---------------------------------------------------------------------------------------------- weights

    def read_weights(self, path: str | Path) -> None:
        folder = check_model_folder(path)
        self._require_reload("load()")
        if found := mismatch(in_files(self._folder.weight_files), in_files(folder.weight_files)):
            raise SyncError(f"{folder.path} holds another model than the inference engine's: {found}")
        self._incoming = folder.path

    def take_weights(self, *, version: int) -> None:
        self._replica.hold(_VALUES)
        self._call(ReplicaShard.reload, str(self._incoming))
        self._replica.weights_changed(version)
        self._replica.release(_SYNC, _VALUES)  # a sync that stopped midway held it

    def sync_call(self, method: str, calls: list[Any] | None) -> list[Any]:
        """Call the receivers in the replica's shards. No step is made until the round has ended."""
        if method == Receiver.begin.__name__:
            self._replica.hold(_SYNC)
        if method == Receiver.prepare.__name__ and calls:
            self._require_reload("a weight sync")
            self._check_trainer(WeightManifest.from_bytes(calls[0][1]))
        each: list[Any] = [()] * self._num_shards if calls is None else calls
        results = self._call_each(f"receiver.{method}", each)
        if method == Receiver.commit.__name__:
            _, version, has_moved = each[0]
            (self._replica.weights_changed if has_moved else self._replica.renumber)(version)
            self._replica.release(_SYNC, _VALUES)
        elif method == Receiver.abandon.__name__ and all(self._call(ReplicaShard.is_whole)):  # nothing was written
            self._replica.release(_SYNC)
        return results

    def _require_reload(self, purpose: str) -> None:
        if self._differing:
            raise UnsupportedError(
                f"{purpose} into {self._folder.path.name} on {self.context.device_name}",
                f"{self.engine_name} {self.engine_version} reloads {len(self._differing)} tensors otherwise than it "
                f"first loaded or made them up, such as {self._differing[0]!r}; build the engine again from an "
                "exported folder",
            )

    def _check_trainer(self, manifest: WeightManifest) -> None:
        """Refuse the weights of another model: the loaders would fail midway, or load them without an error."""
        own = in_files(self._folder.weight_files)
        given = {weight.name: weight for weight in manifest.weights}
        shared = own.keys() & given.keys()
        found = mismatch({name: own[name] for name in shared}, {name: given[name] for name in shared})
        if found or not shared:
            raise SyncError(
                "the trainer's model is not the inference engine's, which keeps its weights: "
                f"{found or 'no weight of the one has the name of one of the other'}"
            )
