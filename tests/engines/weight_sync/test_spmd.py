"""Colocated under torchrun: the inference engine lives in the trainer's process, on every rank, with the same verbs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
    import json, os, sys
    import torch
    import rlcore
    from rlcore.nn import HuggingFaceTrainModule
    from rlcore.errors import RlcoreError
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        @torch.no_grad()
        def add(self, amount):
            for parameter in self.parameters():
                parameter.add_(amount)

    folder, out = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {}
    for workers in (1, size):
        with rlcore.meta_device():
            module = Policy.from_pretrained(folder)
        with rlcore.TrainEngine(module) as train, rlcore.InferenceEngine(folder) as infer:
            train.build(devices=[f"cpu:{n}" for n in range(workers)], data_parallel_size=workers, launcher="torchrun")
            infer.build(devices="cpu", launcher="torchrun")
            routes, moved = [], []
            for version in (1, 2):
                train.add(0.01)
                report = train.sync_weights(infer, verify=version == 2)
                routes.append(report.route)
                assert report.handles_opened == (0 if workers == 1 or version == 2 else size * size), report
            assert train.sync_weights(infer).moved_bytes == 0
            state = train.state_dict()
            served = dict(infer.executors[0].workers[0].worker.module.named_parameters())
            found[workers] = {
                "routes": routes,
                "is_equal": all(torch.equal(served[name], tensor) for name, tensor in state.items()),
                "version": infer.version,
            }
            if workers > 1:
                if rank == 1:  # one rank's failure is every rank's
                    infer.executors[0].workers[0].worker._receiver.unpack = lambda packings: 1 / 0
                train.add(0.01)
                try:
                    train.sync_weights(infer)
                except RlcoreError as error:
                    found["error"] = str(error).partition(chr(10))[0]
                found["state"] = infer.sync_state
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump(found, file)
"""


@pytest.mark.slow
def test_the_same_verbs_under_torchrun(qwen2_folder: Path, tmp_path: Path, torchrun: Callable[..., None]) -> None:
    torchrun(PROGRAM, qwen2_folder, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["1"] == {"routes": ["local", "local"], "is_equal": True, "version": 3}
        assert found["2"] == {"routes": ["packed", "packed"], "is_equal": True, "version": 3}
        assert "stopped midway" in found["error"]
        assert "ZeroDivisionError" in found["error"]
        assert found["state"] == "poisoned"
