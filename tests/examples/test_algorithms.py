"""The programs in examples/algorithms/: what is particular to each, and that they learn."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.examples.algorithms import (
    cpgd,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    high_entropy,
    loop,
    ppo,
    reinforce_plus_plus,
    rloo,
    ttrl,
)
from rlcore.quickstart import task

INSTALLED = Path(sys.prefix) / "deepspeed"
"""Where `make test-slow` installs it, apart from what the other tests import."""
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "algorithms"
ALGORITHMS = {
    "cpgd": cpgd.CPGD,
    "dapo": dapo.DAPO,
    "dr_grpo": dr_grpo.DrGRPO,
    "grpo": grpo.GRPO,
    "gspo": gspo.GSPO,
    "high_entropy": high_entropy.HighEntropy,
    "ppo": ppo.PPO,
    "reinforce_plus_plus": reinforce_plus_plus.ReinforcePlusPlus,
    "rloo": rloo.RLOO,
    "ttrl": ttrl.TTRL,
}


@pytest.fixture
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path_factory.getbasetemp() / "algorithms"))
    monkeypatch.setenv("RLCORE_DEVICE", "cpu")


def test_every_program_is_here_and_short() -> None:
    programs = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    for shared in ("loop", "scores"):
        del programs[shared]
    assert sorted(programs) == sorted(ALGORITHMS) and max(programs.values()) < 120


def answers(*lengths: int) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * length) for length in lengths])


def rollout(rewards: list[list[float]]) -> loop.Rollout:
    problems = [task.Problem(row, row) for row in range(len(rewards))]
    return loop.Rollout(problems, [answers(*[2] * len(row)) for row in rewards], torch.tensor(rewards))


def test_overlong_answers_lose_along_a_line() -> None:
    found = dapo.overlong_penalty(torch.tensor([1, 6, 7, 8, 10, 12]), max_tokens=10, buffer=4)
    assert found.tolist() == [0, 0, -0.25, -0.5, -1, -1]


def test_dapo_draws_until_enough_problems_have_both_answers() -> None:
    drawn = [[[1.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]]
    supply = iter(drawn)
    run: Any = SimpleNamespace(num_problems=2, max_tokens=8, sample=lambda count: rollout(next(supply)))
    found = dapo.DAPO().rollout(run)
    assert found.rewards.tolist() == [[0, 1], [1, 0]] and len(found.problems) == len(found.outputs) == 2
    assert next(supply) == drawn[3]  # no more was drawn than was needed
    supply = iter([drawn[1]] * 8)
    assert dapo.DAPO().rollout(run).rewards.tolist() == drawn[1]


def test_a_reward_is_at_the_last_token_that_counts() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 1, 0]]).bool()
    found = reinforce_plus_plus.token_rewards(torch.tensor([2.0, 3.0, 4.0]), mask)
    assert found.tolist() == [[0, 0, 2, 0], [0, 0, 0, 3], [0, 0, 4, 0]]


def test_the_majority_is_right() -> None:
    assert ttrl.majority_rewards(["3", "5", "5", "7"]) == [0, 1, 1, 0]
    assert ttrl.majority_rewards(["3", "5"]) == [1, 0]


def test_the_rewards_of_ttrl_are_votes_on_the_problems_of_the_test() -> None:
    """The verifier, which finds all of them wrong, has no say."""
    texts = [SimpleNamespace(text=text) for text in ("3", "5", "5", "7")]
    sampled = loop.Rollout([task.Problem(1, 2)], [SimpleNamespace(outputs=texts)], torch.zeros(1, 4))
    run: Any = SimpleNamespace(num_problems=1, sample=lambda count: sampled, training=["train"], held_out=["held out"])
    algorithm = ttrl.TTRL()
    algorithm.begin(run)
    assert run.training == ["held out"]
    assert algorithm.rollout(run).rewards.tolist() == [[0, 1, 1, 0]]


def test_the_tokens_of_high_entropy_are_those_of_the_batch() -> None:
    entropy = torch.tensor([[9.0, 1.0, 5.0], [9.0, 2.0, 4.0]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 1]]).bool()
    found = high_entropy.high_entropy_mask(entropy, mask, share=0.5)
    assert found.tolist() == [[False, False, True], [False, False, True]]
    assert high_entropy.high_entropy_mask(entropy, mask, share=0.01).sum() == 1


@pytest.fixture(scope="module")
def states() -> list[dict[str, torch.Tensor]]:
    """The weights that imitate the teacher, once there are any."""
    return []


@pytest.fixture
def imitated(states: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs begin with the same weights, for which the first of them imitates the teacher."""
    imitate = loop.Run.imitate

    def imitate_once(run: loop.Run, num_steps: int) -> None:
        imitate(run, 0 if states else num_steps)
        if states:
            run.train.load_state_dict(states[0])
            run.train.sync_weights(run.infer)
        else:
            states.append(run.train.state_dict())

    monkeypatch.setattr(loop.Run, "imitate", imitate_once)


def scores_until(better: Callable[[loop.Score, loop.Score], bool], algorithm: loop.Algorithm) -> list[loop.Score]:
    """Return the score before, and after each five steps, until it is better than before; 30 steps at most."""
    run = loop.Run(algorithm, loop.arguments(algorithm, []))
    try:
        run.imitate(run.options.imitation)
        algorithm.begin(run)
        scores = [run.score()]
        while not better(scores[-1], scores[0]) and len(scores) < 7:
            for _ in range(5):
                run.step()
            scores.append(run.score())
    finally:
        run.close()
    return scores


@pytest.mark.slow
@pytest.mark.usefixtures("imitated", "on_the_cpu")
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "ttrl"])
def test_it_improves_the_score_of_problems_that_it_has_not_seen(name: str) -> None:
    """The standard error of the greedy score is 0.022."""

    def better(after: loop.Score, before: loop.Score) -> bool:
        return after.greedy >= before.greedy + 0.1

    scores = scores_until(better, ALGORITHMS[name]())
    assert better(scores[-1], scores[0]), scores


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_ttrl_makes_right_answers_likelier() -> None:
    """By three standard errors of a difference between two means of independent samples, of the same problems."""

    def better(after: loop.Score, before: loop.Score) -> bool:
        variance = sum(one.sampled * (1 - one.sampled) for one in (after, before)) / (512 * loop.SCORED_SAMPLES)
        return after.sampled > before.sampled + 3 * math.sqrt(variance)

    scores = scores_until(better, ttrl.TTRL())
    assert better(scores[-1], scores[0]), scores


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_takes_steps_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    monkeypatch.setenv("RLCORE_DEVICE", "cuda")
    sizes = ["--steps=2", "--problems=4", "--samples=4", "--held-out=8", "--imitation=50"]
    assert len(loop.main(ALGORITHMS[name](), sizes).rewards) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_fsdp2_and_deepspeed_have_one_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program with the other trainer: the same answers, of which each has its own random numbers."""
    if INSTALLED.is_dir():
        monkeypatch.syspath_prepend(str(INSTALLED))
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed; `make test-slow` does it")
    # a reward that an untrained model finds at once: the share of sevens
    monkeypatch.setattr(loop.Run, "verify", lambda run, problem, text: text.count("7") / 3)
    sizes = ["--rate=3e-3", "--steps=6", "--problems=4", "--samples=8", "--held-out=8", "--imitation=0"]
    first, second = (
        loop.main(dr_grpo.DrGRPO(), [*sizes, "--trainer", trainer]).rewards for trainer in ("fsdp2", "deepspeed")
    )
    # A rounding changes a sampled token only where a random number is next to the edge of a probability.
    assert first == second and first[-1] > first[0]
