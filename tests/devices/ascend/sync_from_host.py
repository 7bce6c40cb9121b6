"""A program that test_from_host.py runs: weight syncs from a trainer on the CPU to a sampler on an NPU, and back.

The last line of the output is JSON: the reports, and whether the weights arrived.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import rlcore

sys.path.insert(0, str(Path(__file__).parents[2] / "engines" / "weight_sync"))
from small_engine import Checkpoint, Sizes, checkpoint, expected, registered, write

SIZES = Sizes(experts=3, is_tied=True, has_state=True)


def rounds(trainer: str, sampler: str, path: Path) -> list[dict[str, Any]]:
    """Sync three times: whole, what has changed, and held against the engine's own loader."""
    train: Any = rlcore.TrainEngine(Checkpoint(checkpoint(SIZES, seed=1)))
    infer: Any = rlcore.InferenceEngine(path, executor="small_apart")
    found = []
    with train, infer:
        train.build(devices=trainer, launcher="process")
        infer.build(devices=sampler, sizes=tuple(SIZES), dtype="bfloat16", launcher="process")
        for is_delta, is_verified in [(True, False), (True, False), (False, True)]:
            train.add(0.25)
            report = train.sync_weights(infer, delta=is_delta, verify=is_verified, checksums="always")
            device = rlcore.get_device(sampler).torch_device
            (fresh,) = expected(train.state_dict(), SIZES, 1, torch.bfloat16, [device])
            (held,) = infer.executors[0].call("held", [((), {})])
            arrived = all(torch.equal(held[name].cpu(), wanted.cpu()) for name, wanted in fresh.items())
            found.append(dataclasses.asdict(report) | {"arrived": arrived})
    return found


if __name__ == "__main__":
    with registered():
        path = write(checkpoint(SIZES), Path(tempfile.mkdtemp()) / "model.safetensors")
        print(json.dumps([rounds("cpu:0", "npu:0", path), rounds("npu:0", "cpu:0", path)]))
