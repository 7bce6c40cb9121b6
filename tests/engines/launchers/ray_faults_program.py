"""The training program that ray_faults.py meets with faults: on host-a of two, in a Ray cluster of both.

It talks with ray_faults.py through files in a folder: each message is a file that is there whole or not at all.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import rlcore
from rlcore.conformance.tiny_model import changed
from rlcore.engines.launchers.ray import cluster
from rlcore.engines.launchers.ray.cluster import connect
from rlcore.errors import RlcoreError
from rlcore.nn import HuggingFaceTrainModule
from tests.engines.launchers.warm_ray import WarmAgent

ADDRESS = "10.77.0.1:6379"
PROMPTS, GREEDY = [[1, 2, 3], [4, 5, 6, 7]], {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
LONGEST_S = 300.0
CALL_S = 45.0
"""How long a call may take: so long a stopped worker keeps a step waiting."""


class Folder:
    """The messages between the two programs."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def say(self, name: str, **content: Any) -> None:
        draft = self.path / f".{name}"
        draft.write_text(json.dumps(content))
        draft.rename(self.path / name)

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def wait(self, name: str, longest_s: float = LONGEST_S) -> dict[str, Any]:
        deadline = time.monotonic() + longest_s
        while not self.has(name):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not come within {longest_s:g} s")
            time.sleep(0.05)
        found: dict[str, Any] = json.loads((self.path / name).read_text())
        return found


def policy(folder: str) -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Policy.from_pretrained(folder)


def loss(logprob: torch.Tensor, entropy: Any, per_token: Any) -> Any:
    return -logprob * per_token["advantages"], {}


def batch() -> dict[str, torch.Tensor]:
    """Return four sequences of six tokens; all tokens but the first of each are trained on."""
    return {
        "input_ids": torch.arange(24) % 13 + 1,
        "cu_seqlens": torch.arange(0, 25, 6, dtype=torch.int32),
        "loss_mask": torch.arange(24) % 6 > 0,
        "advantages": torch.linspace(-1, 1, 4),
    }


class Program:
    """A trainer over both hosts and a sampler on one, and what is known of their weights."""

    def __init__(self, folder: Folder, model: str, seed: int) -> None:
        self.folder, self.model, self.seed = folder, model, seed
        rlcore.init(address=ADDRESS)
        with rlcore.meta_device():
            self.train = rlcore.TrainEngine(policy(model))
        self.infer = rlcore.InferenceEngine(model)
        self.train.build(data_parallel_size=2, num_hosts=2, timeout_s=CALL_S)
        self.infer.build(devices=f"host-{'ab'[seed % 2]}/cpu:1", dtype="float32", timeout_s=CALL_S)
        self.initial = self.train.state_dict()
        self.number = 0
        self.served = {"model": self.log_probs()}
        """Log-probs of the versions of the weights that the sampler may have."""

    def log_probs(self) -> list[list[float]]:
        return [output.outputs[0].logprobs for output in self.infer.generate(PROMPTS, GREEDY)]

    def whereabouts(self) -> dict[str, list[list[Any]]]:
        """Return the host and process id of each worker and agent."""
        workers = [worker for engine in (self.train, self.infer) for worker in engine.executors[0].workers]
        agents = [[name, connect().link(name).facts.pid] for name in ("host-a", "host-b")]
        return {"workers": [[worker.context.host, worker.process_id] for worker in workers], "agents": agents}

    # ------------------------------------------------------------------------------------------------ steps

    def step(self, name: str) -> None:
        if name == "train":
            self.train.train_batch(batch(), loss)
        elif name == "generate":
            found = self.log_probs()
            if found not in self.served.values():
                raise AssertionError(f"the sampler serves no version that it was given: {found}")
        elif name == "sync":
            self.number += 1
            self.train.load_state_dict(changed(self.initial, self.number))
            self.train.sync_weights(self.infer)
            self.served = {"new": self.log_probs()}
        else:
            self.train.restart()

    def recover(self) -> None:
        """Restart what a fault has ended; check that the weights are those of one version, of both engines the same."""
        deadline = time.monotonic() + LONGEST_S
        while [host.name for host in connect().hosts()] != ["host-a", "host-b"]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cluster has {connect().hosts()}")
            time.sleep(0.2)
        for engine in (self.train, self.infer):
            try:
                engine.memory_report()
            except RlcoreError:
                engine.restart()
                if engine is self.train:
                    found = self.train.state_dict()
                    assert all(torch.equal(found[name], self.initial[name]) for name in found), "a mixture is restarted"
        self.number += 1
        new = changed(self.initial, self.number)
        self.train.load_state_dict(new)
        self.train.sync_weights(self.infer, verify=True)
        found = self.train.state_dict()
        assert all(torch.equal(found[name], new[name]) for name in found), "the trainer has other weights than it took"
        first = self.log_probs()
        with rlcore.InferenceEngine(self.model) as another:
            another.build(devices="host-a/cpu:2", dtype="float32", timeout_s=CALL_S)
            self.train.sync_weights(another)
            same = [output.outputs[0].logprobs for output in another.generate(PROMPTS, GREEDY)]
        assert first == same, "two samplers of one version differ: one has a mixture"
        self.served = {"new": first}

    def meet(self, number: int) -> None:
        """Run a step again and again until the fault has come, and tell what came of it."""
        incident = self.folder.wait(f"incident-{number}")
        self.folder.say(f"begin-{number}", **self.whereabouts())
        error, began = "", time.monotonic()
        try:
            while not self.folder.has(f"struck-{number}"):
                self.step(incident["step"])
            began = time.monotonic()
            self.step(incident["step"])
        except RlcoreError as raised:
            error = f"{type(raised).__name__}: {raised}"
        self.folder.say(f"result-{number}", error=error, seconds=time.monotonic() - began)
        self.folder.wait(f"healed-{number}")
        self.recover()
        self.folder.say(f"end-{number}", **self.whereabouts())


def main() -> None:
    path, model, seed, first = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    faulthandler.enable()
    cluster.Agent = WarmAgent  # type: ignore[misc]
    folder = Folder(path)
    program = Program(folder, model, seed)
    folder.say(f"ready-{first}", pid=os.getpid())
    number = first
    while not folder.has("over"):
        if folder.has(f"incident-{number}"):
            program.meet(number)
            number += 1
        time.sleep(0.05)


if __name__ == "__main__":
    main()
