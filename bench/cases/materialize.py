"""Reading a model from safetensors files on this host into a train engine: how fast, and with how much host memory."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_7B, TINY, Dense, Drawn, policy, policy_class
from rlcore.bench.cases.proc import proc_bytes
from rlcore.device import Device
from rlcore.engines.checkpoints.tensor_file import Stamp, host_pieces, write_tensors
from rlcore.engines.train import TrainEngine
from rlcore.weights.shards import local_part

_FILE_BYTES = 4 << 30
_NUM_RUNS = 3
"""The first may find the files on disk; the others find them in the page cache."""
_SPARE_BYTES = 1 << 30
"""Anonymous host memory that may be taken, beside the largest tensor."""
_SAMPLED_S = 0.01


class _Found(NamedTuple):
    """The measurements of one worker."""

    seconds: float
    """From opening the files to the last value on the device."""
    nbytes: int
    """Read, in the dtype of the files."""
    anonymous_bytes: int
    """That host memory grew by at its peak."""


class _AnonymousMemory:
    """The most that this process has had since the start, seen by a thread that looks again and again."""

    def __init__(self) -> None:
        self.first = self.peak = _anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return max(self.peak, _anonymous_bytes()) - self.first

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLED_S):
            self.peak = max(self.peak, _anonymous_bytes())


def _anonymous_bytes() -> int:
    return proc_bytes("self/status", "RssAnon")


def _measured_policy(dense: Dense, folder: Path, device: Device) -> Any:
    class MeasuredPolicy(policy_class()):  # type: ignore[misc]
        def materialization_source(self) -> Path:
            torch.empty(1, device=self.device_type)  # what the device's runtime needs of the host is not counted
            self.memory, self.started = _AnonymousMemory(), time.perf_counter()
            return folder

        def on_weights_materialized(self) -> None:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - self.started
            own = sum(local_part(parameter).numel() for parameter in self.parameters())
            self.found = _Found(seconds, own * torch.bfloat16.itemsize, self.memory.end())

        def what_was_found(self) -> tuple[float, int, int]:
            return self.found.seconds, self.found.nbytes, self.found.anonymous_bytes  # plain, for other processes

        def sums(self) -> list[float]:
            """Return sums of some of this rank's elements."""
            return [float(local_part(parameter.detach()).double().sum()) for parameter in self._some()]

        def _some(self) -> Iterator[Tensor]:
            yield from list(self.parameters())[::40]

    return policy(dense, folder, device.type, MeasuredPolicy)


def _write(dense: Dense, folder: Path, device: Device) -> dict[str, float]:
    """Write a folder in files of 4 GiB; return the sums of the parameters by name."""
    drawn = Drawn(policy(dense, folder, device.type), torch.bfloat16, device.type)
    sums: dict[str, float] = {}

    def contents(names: list[str]) -> Iterator[Iterator[Tensor]]:
        for name in names:
            tensor = drawn[name][...]
            sums[name] = float(tensor.double().sum())
            yield host_pieces(tensor)

    files: list[list[str]] = [[]]
    room = _FILE_BYTES
    for name in drawn:
        nbytes = torch.Size(drawn[name].get_shape()).numel() * torch.bfloat16.itemsize
        if nbytes > room and files[-1]:
            files.append([])
            room = _FILE_BYTES
        files[-1].append(name)
        room -= nbytes
    for number, names in enumerate(files):
        layouts = {name: (torch.bfloat16, drawn[name].get_shape()) for name in names}
        write_tensors(
            folder / f"part-{number}.safetensors", layouts, contents(names), {"format": "pt"}, Stamp("0" * 12)
        )
    return sums


def _prepare(device: Device) -> Work:
    dense, num_devices = (TINY, 2) if device.spec.is_host else (QWEN_7B, device.count())
    dense.config()  # transformers is there
    held = contextlib.ExitStack()
    folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="rlcore-bench-")))
    written = list(_write(dense, folder, device).values())[::40]
    largest = dense.vocabulary * dense.hidden * torch.bfloat16.itemsize

    def run() -> tuple[list[_Found], list[float]]:
        gc.collect()
        device.memory.empty_cache()
        engine = TrainEngine(_measured_policy(dense, folder, device))
        names = [f"{device.spec.name}:{index}" for index in range(num_devices)]
        with engine.build(devices=names, data_parallel_size=num_devices, compute_dtype="bfloat16"):
            parts = engine.call("sums")
            found = [_Found(*one) for one in engine.call("what_was_found")]
            return found, [sum(part) for part in zip(*parts, strict=True)]

    def check(done: tuple[list[_Found], list[float]]) -> None:
        found, sums = done
        for one, wanted in zip(sums, written, strict=True):
            expect(abs(one - wanted) <= 1e-6 * max(1.0, abs(wanted)), f"a parameter sums up to {one}, not {wanted}")
        grown = max(one.anonymous_bytes for one in found)
        # On a host the parameters themselves are anonymous memory.
        expect(
            device.spec.is_host or grown <= largest + _SPARE_BYTES,
            f"host memory grew by {grown} bytes; the largest tensor has {largest}",
        )

    return Work(
        (
            Contender(
                "engine",
                run,
                check,
                seconds=lambda done: max(one.seconds for one in done[0]),
                quantities=lambda done: {
                    "read_a_rank": Quantity(min(one.nbytes / one.seconds for one in done[0]), "B/s"),
                    "anonymous_memory": Quantity(max(1, *(one.anonymous_bytes for one in done[0])), "B"),
                },
            ),
        ),
        {"model": dense.name, "devices": num_devices, "dtype": "bfloat16"},
        close=held.close,
        num_runs=_NUM_RUNS,
    )


cases = (
    Case(
        "train/materialize",
        "a 7B from safetensors files on this host into a train engine, sharded over all devices",
        _prepare,
        effort="full",
        estimate_s=90.0,
    ),
)
