"""Colocated under torchrun: a vLLM worker in the trainer's process, on every rank, with the same verbs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

KIND = "cuda" if torch.cuda.is_available() else "cpu"
PROGRAM = """
    import json, os, sys, time, weakref
    import torch
    import rlcore
    from rlcore.nn import HuggingFaceTrainModule
    from rlcore.errors import RlcoreError
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        @torch.no_grad()
        def scale(self, factor):
            for parameter in self.parameters():
                parameter.mul_(factor)

    GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    PROMPTS = ["1+1=", "90210-777=", "3", "12*12+12="]
    ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 64}
    ENGINE["kv_cache_memory_bytes"] = 1 << 24
    folder, out, kind, workers = sys.argv[1:]
    rank, workers = int(os.environ["RANK"]), int(workers)
    devices = [f"{kind}:{n}" for n in range(workers)]

    def fresh(train, name):
        path = f"{out}/{name}-{rank if workers == 1 else 0}"
        train.export(path)
        while not os.path.isdir(path):  # the first rank writes it, and renames it at last
            time.sleep(0.05)
        with rlcore.InferenceEngine(path) as engine:
            outputs = engine.build(devices="cpu:0", dtype="float32", launcher="inline").generate(PROMPTS, GREEDY)
        return [one.outputs[0].token_ids for one in outputs]

    with rlcore.meta_device():
        module = Policy.from_pretrained(folder)
    with rlcore.TrainEngine(module) as train, rlcore.InferenceEngine(folder, executor="vllm") as infer:
        train.build(devices=devices, data_parallel_size=workers, launcher="torchrun")
        infer.build(devices=devices, tensor_parallel_size=workers, launcher="torchrun", **ENGINE)
        worker = infer.executors[0].workers[0]
        record = {"routes": [], "equal": [], "pid": worker.process_id == os.getpid()}
        for version in (1, 2):
            train.scale(1.1)
            if version == 2:
                infer.meta()
                infer.onload("weights")
            report = train.sync_weights(infer, verify=version == 1)
            infer.onload("kv_cache")
            record["routes"].append(report.route)
            record["fallback_bytes"] = report.fallback_bytes
            ours = [one.outputs[0].token_ids for one in infer.generate(PROMPTS, GREEDY)]
            record["equal"].append(ours == fresh(train, f"{workers}-{version}"))
        if workers > 1:
            try:
                infer.submit(PROMPTS, GREEDY)
            except RlcoreError as error:
                record["submit"] = str(error)
            if rank == 1:  # one rank's failure is every rank's
                worker.worker._replica.hold = lambda *_: 1 / 0
            train.scale(1.1)
            try:
                train.sync_weights(infer)
            except RlcoreError as error:
                record["error"] = str(error).partition(chr(10))[0]
            record["state"] = infer.sync_state
            worker.worker._replica.__dict__.pop("hold", None)
        model = worker.worker._engine.model_executor.driver_worker.get_model()
        model = weakref.ref(next(model.parameters()))
    record["freed"] = model() is None
    with rlcore.InferenceEngine(folder, executor="vllm") as infer:
        try:
            infer.build(devices=devices, tensor_parallel_size=workers, launcher="torchrun", **ENGINE)
            record["another"] = len(infer.generate(PROMPTS, GREEDY))
        except RlcoreError as error:
            record["another"] = str(error)
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump(record, file)
"""


@pytest.mark.skipif(KIND == "cuda" and torch.cuda.device_count() < 2, reason="needs two CUDA devices, or none")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_verbs_under_torchrun(
    workers: int, model_folder: Path, tmp_path: Path, torchrun: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica on each of two ranks, and one of both."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    torchrun(PROGRAM, model_folder, tmp_path, KIND, workers)
    between = "packed" if KIND == "cpu" else "direct"
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (found["pid"], found["fallback_bytes"], found["equal"]) == (True, 0, [True] * 2)
        assert found["routes"] == ["local" if workers == 1 else between] * 2
        if KIND == "cpu":
            assert (found["freed"], found["another"]) == (True, 4)
        else:  # its allocator may keep some memory
            assert found["another"] == 4 or "one vLLM engine in a process" in found["another"]
        if workers > 1:
            assert "submit() on 2 ranks of torchrun is not supported" in found["submit"]
            assert "ZeroDivisionError" in found["error"]
            assert found["state"] == "serving"
