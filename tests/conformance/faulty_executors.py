"""An rlcore plugin of executors that are wrong in one way each; but for that they are the built-in ones."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import rlcore
from rlcore.engines.fsdp2.executor import Fsdp2Executor
from rlcore.engines.rank_batch import WEIGHT
from rlcore.engines.sampling.hf.executor import HfExecutor
from rlcore.errors import CheckpointError, UnsupportedError
from rlcore.types import OffloadReport

NOTHING = OffloadReport(moved_bytes=0, freed_device_bytes=0, seconds=0.0, pinned=False, first_use=False)


def with_completions(outputs: Sequence[Any], change: Any) -> list[Any]:
    return [replace(output, outputs=[change(one) for one in output.outputs]) for output in outputs]


class LogProbsOfAnotherTemperature(HfExecutor):
    def generate(self, prompts: Any, params: Any = None, *, version: int) -> Any:
        def change(one: Any) -> Any:
            return replace(one, logprobs=[logprob * params[0].temperature or logprob for logprob in one.logprobs])

        return with_completions(super().generate(prompts, params, version=version), change)


class SeedIgnored(HfExecutor):
    def generate(self, prompts: Any, params: Any = None, *, version: int) -> Any:
        return super().generate(prompts, [replace(one, seed=None) for one in params], version=version)


class SeedOfThePlaceInTheBatch(HfExecutor):
    def generate(self, prompts: Any, params: Any = None, *, version: int) -> Any:
        each = [replace(one, seed=None if one.seed is None else one.seed + at) for at, one in enumerate(params)]
        return super().generate(prompts, each, version=version)


class TooOftenTheLikeliest(HfExecutor):
    """Draws as at half the temperature, and scores what it drew rightly."""

    def generate(self, prompts: Any, params: Any = None, *, version: int) -> Any:
        each = [replace(one, temperature=one.temperature / 2) for one in params]
        return super().generate(prompts, each, version=version)


class StopTokensIgnored(HfExecutor):
    def generate(self, prompts: Any, params: Any = None, *, version: int) -> Any:
        return super().generate(prompts, [replace(one, stop_token_ids=()) for one in params], version=version)


class TokensOfNoNumbers(HfExecutor):
    def generate(self, prompts: Any, params: Any = None, *, version: int) -> Any:
        with torch.no_grad():
            for tensor in self.module.parameters():
                tensor.nan_to_num_()
        return super().generate(prompts, params, version=version)


class NoVersionSpans(HfExecutor):
    def _completion(self, decoded: Any) -> Any:
        return replace(super()._completion(decoded), version_spans=())


class TooLongPromptsAccepted(HfExecutor):
    def build(self, path: str | Path, /, **options: Any) -> None:
        super().build(path, **options)
        self._reader.max_positions = None


class AbortLosesOthers(HfExecutor):
    def abort(self, numbers: Any) -> int:
        return min(super().abort(None), len(numbers or ()))


class AbortKeepsTheEnded(HfExecutor):
    def abort(self, numbers: Any) -> int:
        ended = dict(self._queue._done)
        count = super().abort(numbers)
        self._queue._done.update(ended)
        return count


class PauseGoesOn(HfExecutor):
    def pause(self, mode: Any, *, version: int) -> None:
        if mode != "keep":
            super().pause(mode, version=version)


class SyncSkipsOneTensor(HfExecutor):
    def sync_call(self, method: str, calls: Any) -> Any:
        norm = self.module.model.norm.weight
        if method == "begin":
            self._kept = norm.clone()
        found = super().sync_call(method, calls)
        if method == "commit":
            norm.copy_(self._kept)
        return found


class LoadSkipsOneTensor(HfExecutor):
    def take_weights(self, *, version: int) -> None:
        kept = self.module.model.norm.weight.clone()
        super().take_weights(version=version)
        self.module.model.norm.weight.copy_(kept)


class DamagedFoldersAccepted(HfExecutor):
    def read_weights(self, path: str | Path) -> None:
        with contextlib.suppress(CheckpointError):
            super().read_weights(path)

    def take_weights(self, *, version: int) -> None:
        if self._incoming is not None:
            super().take_weights(version=version)


class OffloadKeepsMemory(HfExecutor):
    def offload(self, tag: str) -> OffloadReport:
        return NOTHING


class OffloadLosesValues(HfExecutor):
    """The last bit of one weight: completions are as before."""

    def offload(self, tag: str) -> OffloadReport:
        if tag == "weights":
            with torch.no_grad():
                next(self.module.parameters()).view(-1).view(torch.uint8)[0] ^= 1
        return super().offload(tag)


class ProcessLeft(HfExecutor):
    def build(self, path: str | Path, /, **options: Any) -> None:
        super().build(path, **options)
        subprocess.Popen(["sleep", "45"])


class MicroBatchesWeighTheSame(Fsdp2Executor):
    """The loss is the mean of their means, as of a loop that divides by their number."""

    def train_step(self, batch: Any, loss_fn: Any, options: Any) -> Any:
        packed = batch.packed | {WEIGHT: batch.packed[WEIGHT] / batch.num_micro_batches}
        return super().train_step(replace(batch, packed=packed), loss_fn, options)


class NoClipping(Fsdp2Executor):
    def train_step(self, batch: Any, loss_fn: Any, options: Any) -> Any:
        return super().train_step(batch, loss_fn, replace(options, max_grad_norm=None))


class ScoresAtTemperatureOne(Fsdp2Executor):
    def score(self, batch: Any, options: Any) -> Any:
        return super().score(batch, replace(options, temperature=1.0))


class EvaluationLeavesGradients(Fsdp2Executor):
    def evaluate(self, batch: Any, loss_fn: Any, options: Any) -> Any:
        found = super().evaluate(batch, loss_fn, options)
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        return found


class SaveWithoutOptimizer(Fsdp2Executor):
    def save(self, folder: Path, extra: Any, blocking: bool, algorithm: str) -> Any:
        state = self.module.optimizer.state
        kept = dict(state)
        state.clear()
        try:
            return super().save(folder, extra, blocking, algorithm)
        finally:
            state.update(kept)


class LoadSkipsTheOptimizer(Fsdp2Executor):
    def load(self, folder: Path) -> Any:
        kept = {parameter: dict(state) for parameter, state in self.module.optimizer.state.items()}
        found = super().load(folder)
        self.module.optimizer.state.clear()
        self.module.optimizer.state.update(kept)
        return found


class SaveInTheBackgroundIsLate(Fsdp2Executor):
    """Writes what there is when it is waited for."""

    def save(self, folder: Path, extra: Any, blocking: bool, algorithm: str) -> Any:
        if blocking:
            return super().save(folder, extra, blocking, algorithm)
        self._late = folder, extra, True, algorithm
        return "late", 0.0

    def end_save(self) -> float | None:
        return None if not hasattr(self, "_late") else super().save(*self._late)[1]


class StateDictIsTheTrainersMemory(Fsdp2Executor):
    def state_dict(self, adapters: Any) -> Any:
        return dict(self.module.named_weights(adapters))


class LoadStateDictTakesWhatFits(Fsdp2Executor):
    def load_state_dict(self, state: Any) -> None:
        own = super().state_dict("merged")
        fits = {name: tensor for name, tensor in state.items() if name in own and tensor.shape == own[name].shape}
        super().load_state_dict(own | fits)


class OptimizerIsLost(Fsdp2Executor):
    def offload(self, tag: str) -> OffloadReport:
        if tag == "optimizer":
            for state in self.module.optimizer.state.values():
                state["exp_avg"].zero_()
        return super().offload(tag)


class SenderSkipsOneTensor(Fsdp2Executor):
    """Sends an older copy of it, as of a list of tensors that was made once."""

    def sync_call(self, method: str, calls: Any) -> Any:
        norm = self.module.model.norm.weight
        if method == "begin" and not hasattr(self, "_first"):
            self._first = norm.detach().clone()
        now = norm.detach().clone()
        with torch.no_grad():
            norm.copy_(self._first)
            found = super().sync_call(method, calls)
            norm.copy_(now)
        return found


class WithoutCheckpoints(Fsdp2Executor):
    """No fault: it says so."""

    def save(self, folder: Path, extra: Any, blocking: bool, algorithm: str) -> Any:
        raise UnsupportedError("save() of this executor", "its state is on other machines")


@rlcore.hookimpl
def rlcore_register_executors(register: Any) -> None:
    for name, found in list(globals().items()):
        for kind, base in (("inference", HfExecutor), ("train", Fsdp2Executor)):
            if isinstance(found, type) and issubclass(found, base) and found is not base:
                register(kind, name, f"{__name__}:{name}")
