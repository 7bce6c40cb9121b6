"""The quickstart's task for ``rlcore train``, as addition.yaml names it, and the model that it begins with.

usage: addition.py FOLDER [SEED]      writes a model that imitates a teacher who forgets carries
       rlcore train addition.yaml     teaches it addition by reinforcement learning

A model with random weights gives no right answer, of which it could learn. So it imitates first, as in
``rlcore quickstart``, until about half of its sampled answers are right.
"""

import sys
from typing import Any

import torch

import rlcore
from rlcore.quickstart import task
from rlcore.quickstart.host_threads import host_threads
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.policy import policy_class
from rlcore.quickstart.pretrained import tokenizer_of

IMITATION_STEPS = 300


def training_items() -> list[dict[str, Any]]:
    return [item(problem) for problem in task.problems("train", seed=0)]


def held_out_items() -> list[dict[str, Any]]:
    return [item(problem) for problem in task.problems("held-out", seed=0)]


def item(problem: task.Problem) -> dict[str, Any]:
    return {"prompt": task.prompt_text(problem), "a": problem.a, "b": problem.b}


def verify(item: dict[str, Any], text: str) -> float:
    """The reward: 1 for the right sum, else 0."""
    return task.reward(task.Problem(item["a"], item["b"]), text)


@host_threads(1)  # the model is small: more threads of the host would wait for each other
def main(folder: str, seed: int = 0) -> None:
    path = quickstart_model(seed=seed)
    tokenizer, problems = tokenizer_of(path), task.problems("train", seed=0)
    generator = torch.Generator().manual_seed(seed)
    with rlcore.meta_device():
        module = policy_class(path).from_pretrained(path)
    with rlcore.TrainEngine(module) as train:
        train.build()
        for step in range(IMITATION_STEPS):
            train.set_rate(2e-3 * min(1, (step + 1) / 20))
            train.imitate(**task.imitation_batch(problems, 256, tokenizer, generator))
        train.export(folder)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: addition.py FOLDER [SEED]; FOLDER is where the model goes, and SEED 0 if you name none")
    main(sys.argv[1], *map(int, sys.argv[2:3]))
