"""Reading a model from safetensors files on this host into a train engine: how fast, and with how much host memory."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch

from rlcore.bench.case import Case, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_7B, TINY, Folder, ModelShape, policy, policy_class
from rlcore.bench.cases.timing import Measured, PeakWatch, proc_bytes, self_timed
from rlcore.device import Device
from rlcore.engines.train import TrainEngine
from rlcore.weights.shards import local_part

_NUM_RUNS = 3
"""The first may find the files on disk; the others find them in the page cache."""
_SPARE_BYTES = 1 << 30
"""Anonymous host memory that may be taken, beside the largest tensor."""
_SAMPLED_S = 0.01
_SUMMED = 40
"""The sum of one in so many parameters is compared."""


def _anonymous_bytes() -> int:
    return proc_bytes("self/status", "RssAnon")


def _measured_policy(dense: ModelShape, folder: Path, device: Device) -> Any:
    class MeasuredPolicy(policy_class()):  # type: ignore[misc]
        def materialization_source(self) -> Path:
            torch.empty(1, device=self.device_type)  # what the device's runtime needs of the host is not counted
            self.memory, self.started = PeakWatch(_anonymous_bytes, _SAMPLED_S), time.perf_counter()
            return folder

        def on_weights_materialized(self) -> None:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - self.started
            own = sum(local_part(parameter).numel() for parameter in self.parameters())
            self.found = seconds, own * torch.bfloat16.itemsize, self.memory.end() - self.memory.first

        def what_was_found(self) -> tuple[float, int, int]:
            """Return the seconds from opening the files to the last value on the device, the bytes that were read, in
            the dtype of the files, and those that anonymous host memory grew by at its peak."""
            return self.found

        def sums(self) -> list[float]:
            """Return sums of some of this rank's elements."""
            some = list(self.parameters())[::_SUMMED]
            return [float(local_part(parameter.detach()).double().sum()) for parameter in some]

    return policy(dense, folder, device.type, MeasuredPolicy)


def _prepare(device: Device) -> Work:
    dense, num_devices = (TINY, 2) if device.spec.is_host else (QWEN_7B, device.count())
    folder = Folder(dense, torch.bfloat16, device)
    written = [float(folder.weights[name][...].double().sum()) for name in list(folder.weights)[::_SUMMED]]
    largest = dense.vocabulary * dense.hidden * torch.bfloat16.itemsize

    def run() -> Measured:
        gc.collect()
        device.memory.empty_cache()
        engine = TrainEngine(_measured_policy(dense, folder.path, device))
        names = [f"{device.spec.name}:{index}" for index in range(num_devices)]
        with engine.build(devices=names, data_parallel_size=num_devices, compute_dtype="bfloat16"):
            sums = [sum(part) for part in zip(*engine.call("sums"), strict=True)]
            seconds, nbytes, grown = zip(*engine.call("what_was_found"), strict=True)
        quantities = {
            "read_a_rank": Quantity(min(read / taken for read, taken in zip(nbytes, seconds, strict=True)), "B/s"),
            "anonymous_memory": Quantity(max(1, *grown), "B"),
        }
        return Measured((sums, max(grown)), max(seconds), quantities)

    def check(done: tuple[list[float], int]) -> None:
        sums, grown = done
        for one, wanted in zip(sums, written, strict=True):
            expect(abs(one - wanted) <= 1e-6 * max(1.0, abs(wanted)), f"a parameter sums up to {one}, not {wanted}")
        # On a host the parameters themselves are anonymous memory.
        expect(
            device.spec.is_host or grown <= largest + _SPARE_BYTES,
            f"host memory grew by {grown} bytes; the largest tensor has {largest}",
        )

    return Work(
        (self_timed("engine", run, check),),
        {"model": dense.name, "devices": num_devices, "dtype": "bfloat16"},
        close=folder.close,
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
