"""What test_without_ipc.py runs where NPUs share no memory: weight syncs from one process to another on one NPU.

The last line of the output is JSON: the reports, whether the weights arrived, and what direct is answered with.
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
from rlcore.errors import UnsupportedError

sys.path.insert(0, str(Path(__file__).parents[2] / "engines" / "weight_sync"))
from small_engine import Checkpoint, Sizes, checkpoint, expected, registered, write

SIZES = Sizes(experts=3, is_tied=True, has_state=True)


def main() -> dict[str, Any]:
    path = write(checkpoint(SIZES), Path(tempfile.mkdtemp()) / "model.safetensors")
    train: Any = rlcore.TrainEngine(Checkpoint(checkpoint(SIZES, seed=1)))
    infer: Any = rlcore.InferenceEngine(path, executor="small_apart")
    found: dict[str, Any] = {"reports": [], "arrived": []}
    with train, infer:
        train.build(devices="npu:0", launcher="process")
        infer.build(devices="npu:0", sizes=tuple(SIZES), dtype="bfloat16", launcher="process")
        for route in (None, "packed", None):
            train.add(0.25)
            report = train.sync_weights(infer, route=route, checksums="always", verify=route is not None)
            found["reports"].append(dataclasses.asdict(report))
            npu = rlcore.get_device("npu").torch_device
            (fresh,) = expected(train.state_dict(), SIZES, 1, torch.bfloat16, [npu])
            (held,) = infer.executors[0].call("held", [((), {})])
            found["arrived"].append(all(torch.equal(held[name], wanted) for name, wanted in fresh.items()))
        train.add(0.25)
        try:
            train.sync_weights(infer, route="direct")
        except UnsupportedError as error:
            found["direct"] = str(error)
    return found


if __name__ == "__main__":
    with registered():
        print(json.dumps(main()))
