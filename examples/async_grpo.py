"""Asynchronous GRPO on the quickstart's task: the sampler makes the next answers while the trainer trains.

Trainer and sampler have a device and a process each, or share both. First the model imitates a teacher that forgets
carries, as in ``rlcore quickstart``; then it learns from a verifier, which is the part that is asynchronous.
A task that is nearly solved gives few groups that teach, and a step takes long: the program ends at ``--stop-at``.
``--timeline`` writes who did what when, ``--record`` what came of it, both as JSON; ``rlcore trace
examples/async_grpo.py 2`` shows the timeline as a page.
"""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import rlcore
from rlcore.ops import decoupled_ppo, group_advantage
from rlcore.quickstart import task
from rlcore.quickstart.host_threads import host_threads
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.policy import policy_class
from rlcore.quickstart.pretrained import tokenizer_of
from rlcore.quickstart.run import SMALL
from rlcore.rollout import RolloutController, SingleTurn, Trajectory
from rlcore.rollout.stats import RolloutStats

GROUPS, SAMPLES, MINIBATCHES, TEMPERATURE, RATE, IMITATION_STEPS = 32, 8, 4, 1.25, 3e-4, 300


def verify(problem: dict[str, Any], text: str) -> float:
    return task.reward(task.Problem(problem["a"], problem["b"]), text)


def items(problems: list[task.Problem]) -> list[Any]:
    """The episodes' data: plain, so that ``rollout.state_dict()`` can stand in a checkpoint."""
    return [{"a": one.a, "b": one.b, "prompt": task.prompt_text(one)} for one in problems]


def has_both(trajectories: list[Trajectory]) -> bool:
    """Keep the groups with right and wrong answers: the others have no advantage (dynamic sampling)."""
    return len({one.reward for one in trajectories}) > 1


def share_rejected(earlier: RolloutStats, now: RolloutStats) -> float:
    """Return which share of the groups that ended in between was rejected; 0 without any."""
    rejected, kept = now.rejected - earlier.rejected, now.ended - earlier.ended
    return rejected / max(rejected + kept, 1)


def trainer(seed: int) -> rlcore.TrainEngine:
    path = quickstart_model(seed=seed)
    with rlcore.meta_device():
        return rlcore.TrainEngine(policy_class(path).from_pretrained(path))


def imitate(train: rlcore.TrainEngine, seed: int) -> None:
    """Supervised warm-start: afterwards about a third of the greedy answers are right."""
    tokenizer = tokenizer_of(quickstart_model(seed=seed))
    problems, generator = task.problems("train", seed=seed), torch.Generator().manual_seed(seed)
    for step in range(IMITATION_STEPS):
        train.set_rate(2e-3 * min(1, (step + 1) / 20))
        train.imitate(**task.imitation_batch(problems, 256, tokenizer, generator))
    train.begin_reinforcement()
    train.set_rate(RATE)


def learn(train: rlcore.TrainEngine, batch: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """One update: the clip is around the weights at its beginning, the samples are of older ones."""
    batch["advantages"] = group_advantage(batch["rewards"], group=batch["group"])
    batch["old_logprobs"] = train.forward_logprobs(batch, temperature=TEMPERATURE)
    for rows in torch.randperm(len(batch["rewards"]), generator=generator).chunk(MINIBATCHES):
        minibatch = {name: values[rows] for name, values in batch.items()}
        train.train_batch(minibatch, decoupled_ppo(), temperature=TEMPERATURE)


def reinforce(
    train: rlcore.TrainEngine,
    infer: rlcore.InferenceEngine,
    max_staleness: int,
    *,
    num_steps: int,
    seed: int,
    seconds: float = math.inf,
    stop_at: float = 1.0,
    timeline: Path | None = None,
) -> dict[str, Any]:
    """Take so many steps, or steps for so many seconds; return what came of it.

    Args:
        stop_at: the last step is the first for which this share of the groups, or more, was rejected.
    """
    max_tokens = task.max_answer_tokens(tokenizer_of(infer.path))
    sample = SingleTurn(verify, {"n": SAMPLES, "max_tokens": max_tokens, "temperature": TEMPERATURE})
    answer = SingleTurn(verify, {"temperature": 0, "max_tokens": max_tokens})
    held_out = items(task.problems("held-out", seed=seed))
    generator = torch.Generator().manual_seed(seed)
    problems: Any = items(task.problems("train", seed=seed))
    dataloader: Any = torch.utils.data.DataLoader(problems, GROUPS, shuffle=True, collate_fn=list, generator=generator)
    with RolloutController(infer, sample, batch_size=GROUPS, max_staleness=max_staleness, accept=has_both) as rollout:
        rollout.update_weights(train, version=rollout.version)
        before = accuracy(rollout, held_out, answer)
        print(f"accuracy {before:.3f} after imitation", flush=True)
        rollout.timeline.clear()
        step, rejected = 0, 0.0
        while step < num_steps and rejected < stop_at and rollout.timeline.total_s < seconds:
            earlier = rollout.stats
            batch = rollout.prepare_batch(dataloader)
            learn(train, batch, generator)
            rollout.update_weights(train)
            step += 1
            rejected = share_rejected(earlier, rollout.stats)
            if step % 10 == 0:
                print(f"step {step:3}  reward {batch['rewards'].mean():.3f}  rejected {rejected:.0%}", flush=True)
        if rejected >= stop_at:
            print(f"step {step} is the last: {rejected:.0%} of its groups had equal rewards, which teach nothing")
        took_s, stats = rollout.timeline.total_s, rollout.stats
        if timeline:
            rollout.timeline.save(timeline)
        after = accuracy(rollout, held_out, answer)
    print(stats)
    print(f"accuracy {after:.3f} after {step} steps in {took_s:.1f} s")
    run = {"max_staleness": max_staleness, "steps": step, "seed": seed}
    return run | {"accuracy_before": before, "accuracy": after, "seconds": took_s, "stats": asdict(stats)}


def accuracy(rollout: RolloutController, held_out: list[Any], answer: SingleTurn) -> float:
    """Share of right greedy answers."""
    episodes = rollout.evaluate(held_out, answer)
    return sum(one.trajectories[0].reward for one in episodes) / len(held_out)


@host_threads(1)  # the model is small: more threads of the host would wait for each other
def main(
    max_staleness: int = 1,
    steps: int = 40,
    seed: int = 0,
    *,
    train_on: str = "cpu:0",
    sample_on: str = "cpu:1",
    executor: str = "hf",
    stop_at: float = 0.9,
    timeline: Path | None = None,
    record: Path | None = None,
) -> None:
    sampler = rlcore.InferenceEngine(quickstart_model(seed=seed), executor=executor)
    with trainer(seed) as train, sampler as infer:
        train.build(devices=train_on, launcher="process")
        infer.build(devices=sample_on, launcher="process", dtype="float32", **SMALL.get(executor, {}))
        imitate(train, seed)
        found = reinforce(train, infer, max_staleness, num_steps=steps, seed=seed, stop_at=stop_at, timeline=timeline)
    if record:
        record.write_text(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in ("max_staleness", 1), ("steps", 40), ("seed", 0):
        parser.add_argument(name, type=int, nargs="?", default=number)
    for name, word in ("--train-on", "cpu:0"), ("--sample-on", "cpu:1"), ("--executor", "hf"):
        parser.add_argument(name, default=word)
    parser.add_argument("--stop-at", type=float, default=0.9, help="share of rejected groups at which it ends")
    for name in ("--timeline", "--record"):
        parser.add_argument(name, type=Path)
    main(**vars(parser.parse_args()))
