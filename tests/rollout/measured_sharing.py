"""What asynchrony wins with a model of real size, with trainer and sampler on one device, or on two.

    python -m tests.rollout.measured_sharing FILE [--train-on cuda:0] [--sample-on cuda:0] [--executor vllm]

Weights are random, so that nothing is learned; ``measured_learning.py`` measures that. FILE is JSON: the machine, the
load, and for each bound the statistics and the timeline of the same number of steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

import rlcore
from rlcore.atomic import write_file
from rlcore.bench.cases.models import QWEN_1_5B, TINY, Folder, Load, learner
from rlcore.bench.measurement.system import new_record
from rlcore.ops import decoupled_ppo, group_advantage
from rlcore.rollout import RolloutClient, RolloutController, Trajectory, Workflow
from rlcore.tensor_data import dtype_name

LOADS = {
    "host": Load(TINY, torch.float32, 4, 4, 16, 24),
    "device": Load(QWEN_1_5B, torch.bfloat16, 32, 8, 128, 256),
}
VLLM: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 6 << 30}
"""Keys and values of all 256 samples of a batch are 3.5 GiB."""
_MOST_TOKENS = 8192
"""A micro-batch has so many. Beside a vLLM on one H200 16,384 did not fit; the error of that run advised this."""


class EvenTokens(Workflow):
    """Samples as many tokens as the item says; the reward is the share of even ones."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    async def run_episode(self, client: RolloutClient, data: Any) -> list[Trajectory]:
        params = {"n": self._samples, "max_tokens": data["length"], "ignore_eos": True}
        output = await client.generate(data["prompt"], params)
        return [
            Trajectory.of(
                output.prompt_token_ids, one, reward=sum(t % 2 == 0 for t in one.token_ids) / len(one.token_ids)
            )
            for one in output.outputs
        ]


def learn(train: rlcore.TrainEngine, batch: dict[str, Any]) -> None:
    batch["advantages"] = group_advantage(batch["rewards"], group=batch["group"])
    batch["old_logprobs"] = train.forward_logprobs(batch)
    train.train_batch(batch, decoupled_ppo(), max_tokens_per_micro_batch=_MOST_TOKENS)


def run(train: rlcore.TrainEngine, infer: rlcore.InferenceEngine, load: Load, bound: int, steps: int) -> dict[str, Any]:
    """Return statistics, timeline and seconds of the steps that come after two others."""
    lengths = load.lengths()
    items = [{"prompt": ids, "length": length} for ids, length in zip(load.prompt_ids(), lengths, strict=True)]
    with (
        RolloutController(infer, EvenTokens(load.samples), batch_size=load.prompts, max_staleness=bound) as rollout,
        tempfile.TemporaryDirectory() as folder,
    ):
        rollout.update_weights(train, version=rollout.version)
        for step in range(2 + steps):
            if step == 2:
                rollout.timeline.clear()
            learn(train, rollout.prepare_batch(items))
            rollout.update_weights(train)
        seconds, stats = rollout.timeline.total_s, rollout.stats
        rollout.timeline.save(Path(folder, "timeline.json"))
        timeline = json.loads(Path(folder, "timeline.json").read_text())
    used = [*train.memory_report(), *infer.memory_report()]
    print(f"bound {bound}: {seconds / steps:.2f} s a step", stats, sep="\n", flush=True)
    return {
        "max_staleness": bound,
        "steps": steps,
        "seconds": seconds,
        "stats": asdict(stats),
        "timeline": timeline,
        "memory": msgspec.to_builtins(used, enc_hook=str),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--train-on", default="cpu:0")
    parser.add_argument("--sample-on", default="cpu:1")
    parser.add_argument("--executor", default="hf")
    parser.add_argument("--bounds", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    device = rlcore.get_device(given.train_on)
    load = LOADS["host" if device.spec.is_host else "device"]
    options: dict[str, Any] = VLLM if given.executor == "vllm" and not device.spec.is_host else {}
    found: dict[str, Any] = {"load": load.params, "runs": []}
    with (
        closing(Folder(load.model, load.dtype, device)) as folder,
        rlcore.TrainEngine(learner(folder.path)) as train,
        rlcore.InferenceEngine(folder.path, executor=given.executor) as infer,
    ):
        train.build(devices=given.train_on, launcher="process", compute_dtype=dtype_name(load.dtype))
        infer.build(devices=given.sample_on, launcher="process", dtype=dtype_name(load.dtype), **options)
        for bound in given.bounds:
            where = {"train_on": given.train_on, "sample_on": given.sample_on, "executor": given.executor}
            found["runs"].append(run(train, infer, load, bound, given.steps) | where)
            write_file(given.file, json.dumps(found, indent=1).encode())
    record = msgspec.to_builtins(new_record(device))
    names = "started_at", "rlcore", "commit", "system", "dependencies", "environment"
    write_file(given.file, json.dumps({name: record[name] for name in names} | found, indent=1).encode())


if __name__ == "__main__":
    main()
