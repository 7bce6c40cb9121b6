"""Asynchronous GRPO on the quickstart's task: the sampler makes the next answers while the trainer trains.

usage: async_grpo.py [MAX_STALENESS [STEPS [SEED [TIMELINE]]]]

Trainer and sampler have a device and a process each. First the model imitates a teacher that forgets carries, as in
``rlcore quickstart``; then it learns from a verifier, which is the part that is asynchronous. TIMELINE is the name of a
file, in JSON, of who did what when; ``rlcore trace examples/async_grpo.py 2`` shows that as a page.
"""

import sys
from typing import Any

import torch

import rlcore
from rlcore.ops import decoupled_ppo, group_advantage
from rlcore.quickstart import task
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.policy import policy_class
from rlcore.quickstart.pretrained import tokenizer_of
from rlcore.rollout import RolloutController, SingleTurn, Trajectory

GROUPS, SAMPLES, MINIBATCHES, TEMPERATURE, RATE, IMITATION_STEPS = 32, 8, 4, 1.25, 3e-4, 300


def verify(problem: dict[str, Any], text: str) -> float:
    return task.reward(task.Problem(problem["a"], problem["b"]), text)


def items(problems: list[task.Problem]) -> list[Any]:
    """The episodes' data: plain, so that ``rollout.state_dict()`` can stand in a checkpoint."""
    return [{"a": one.a, "b": one.b, "prompt": task.prompt_text(one)} for one in problems]


def has_both(trajectories: list[Trajectory]) -> bool:
    """Keep the groups with right and wrong answers: the others have no advantage (dynamic sampling)."""
    return len({one.reward for one in trajectories}) > 1


def imitate(train: rlcore.TrainEngine, seed: int, tokenizer: Any) -> None:
    """Supervised warm-start, until about half of the sampled answers are right."""
    problems, generator = task.problems("train", seed=seed), torch.Generator().manual_seed(seed)
    for step in range(IMITATION_STEPS):
        train.set_rate(2e-3 * min(1, (step + 1) / 20))
        train.imitate(**task.imitation_batch(problems, 256, tokenizer, generator))
    train.begin_reinforcement()


def learn(train: rlcore.TrainEngine, batch: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """One update: the clip is around the weights at its beginning, the samples are of older ones."""
    batch["advantages"] = group_advantage(batch["rewards"], group=batch["group"])
    batch["old_logprobs"] = train.forward_logprobs(batch, temperature=TEMPERATURE)
    for rows in torch.randperm(len(batch["rewards"]), generator=generator).chunk(MINIBATCHES):
        minibatch = {name: values[rows] for name, values in batch.items()}
        train.train_batch(minibatch, decoupled_ppo(), temperature=TEMPERATURE)


def main(max_staleness: int = 1, num_steps: int = 40, seed: int = 0, *, timeline: str = "") -> None:
    path = quickstart_model(seed=seed)
    tokenizer = tokenizer_of(path)
    max_tokens = task.max_answer_tokens(tokenizer)
    sample = SingleTurn(verify, {"n": SAMPLES, "max_tokens": max_tokens, "temperature": TEMPERATURE})
    answer = SingleTurn(verify, {"temperature": 0, "max_tokens": max_tokens})
    held_out = items(task.problems("held-out", seed=seed))
    generator = torch.Generator().manual_seed(seed)
    problems: Any = items(task.problems("train", seed=seed))
    dataloader: Any = torch.utils.data.DataLoader(problems, GROUPS, shuffle=True, collate_fn=list, generator=generator)
    with rlcore.meta_device():
        module = policy_class(path).from_pretrained(path)
    with rlcore.TrainEngine(module) as train, rlcore.InferenceEngine(path) as infer:
        train.build(devices="cpu:0", launcher="process")
        infer.build(devices="cpu:1", launcher="process", dtype="float32")
        imitate(train, seed, tokenizer)
        train.set_rate(RATE)
        with RolloutController(
            infer, sample, batch_size=GROUPS, max_staleness=max_staleness, accept=has_both
        ) as rollout:
            rollout.update_weights(train, version=0)
            print(f"accuracy {accuracy(rollout, held_out, answer):.3f} after imitation", flush=True)
            rollout.timeline.clear()
            for step in range(1, num_steps + 1):
                batch = rollout.prepare_batch(dataloader)
                learn(train, batch, generator)
                rollout.update_weights(train)
                if step % 10 == 0:
                    print(f"step {step:3}  reward {batch['rewards'].mean():.3f}", flush=True)
            seconds = rollout.timeline.total_s
            print(rollout.stats)
            if timeline:
                rollout.timeline.save(timeline)
            print(f"accuracy {accuracy(rollout, held_out, answer):.3f} after {num_steps} steps in {seconds:.1f} s")


def accuracy(rollout: RolloutController, held_out: list[Any], answer: SingleTurn) -> float:
    """Share of right greedy answers."""
    episodes = rollout.evaluate(held_out, answer)
    return sum(one.trajectories[0].reward for one in episodes) / len(held_out)


if __name__ == "__main__":
    numbers, file = [int(one) for one in sys.argv[1:4]], sys.argv[4] if len(sys.argv) > 4 else ""
    main(*numbers, timeline=file)
