"""The loop that the algorithms of this folder share, on the quickstart's task; each program is the part that differs.

A step samples answers to some problems, gives each a reward, makes advantages of them, takes some optimizer steps and
syncs the weights. ``Algorithm`` is GRPO without a divergence from a reference; a program overrides what it does
otherwise. Trainer and sampler share one device.

Letters: P problems, n answers to each, N = P n sequences, L longest sequence.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rlcore
from rlcore.ops import LossFn, group_advantage, ppo_clip
from rlcore.quickstart import task
from rlcore.quickstart.host_threads import host_threads
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.policy import PolicyMethods
from rlcore.quickstart.pretrained import model_class, tokenizer_of
from rlcore.quickstart.run import SMALL

IMITATION_RATE, SCORED_SAMPLES = 2e-3, 8
Batch = dict[str, Tensor]


@dataclass
class Rollout:
    """Answers to some problems, and their rewards [P, n]."""

    problems: list[task.Problem]
    outputs: list[Any]
    rewards: Tensor

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each answer, [P, n]."""
        return torch.tensor([[len(answer.token_ids) for answer in one.outputs] for one in self.outputs])

    def rows(self, kept: list[int]) -> Rollout:
        """Return the part of these problems."""
        return Rollout([self.problems[row] for row in kept], [self.outputs[row] for row in kept], self.rewards[kept])


class Score(NamedTuple):
    """Shares of right answers to held-out problems."""

    greedy: float
    """It is that of the likeliest answers."""
    sampled: float
    """It is that of answers drawn at temperature 1: pass@1, the mean of several answers to each problem."""

    def __str__(self) -> str:
        return f"{self.greedy:.3f} greedy, {self.sampled:.3f} sampled"


class Outcome(NamedTuple):
    """Keeps what a run did."""

    before: float
    """``Score.greedy`` before the first step."""
    before_sampled: float
    rewards: list[float]
    """The mean reward of each step."""
    after: float
    after_sampled: float


class Algorithm:
    """An algorithm: it does something of its own at each of the places where algorithms differ."""

    imitation, samples, rate = 300, 8, 3e-4
    """Supervised steps before the first of the algorithm, answers to each problem, and the learning rate, unless
    ``--imitation``, ``--samples`` and ``--rate`` say otherwise."""
    temperature = 1.25
    """It is that of the answers on which it trains."""
    policy: type = PolicyMethods
    """Mixed into the model's class; its methods are those of ``run.train``."""
    token_weights: Any = "seq-mean-token-mean"
    max_length: int | None = None
    num_minibatches = 4
    extra_tokens = 0
    """Tokens that an answer may have beyond the longest right one."""

    def loss_fn(self) -> LossFn:
        return ppo_clip(clip_high=0.2)

    def teacher(self, run: Run, problems: list[task.Problem]) -> list[str]:
        """Return the answers that the warm-start imitates; this teacher forgets carries, and is right half the time."""
        return task.teacher_texts(problems, run.generator)

    def begin(self, run: Run) -> None:
        """Build what the algorithm needs besides trainer and sampler; ``run.keep`` closes it at the end."""

    def rollout(self, run: Run) -> Rollout:
        """Return the answers on which one step trains."""
        return run.sample(run.num_problems)

    def reward(self, run: Run, problem: task.Problem, text: str) -> float:
        return run.verify(problem, text)

    def prepare(self, run: Run, rollout: Rollout, batch: Batch) -> None:
        """Add to the batch what the loss reads: ``advantages``, one for each sequence [N] or token [N, L]."""
        batch["advantages"] = group_advantage(rollout.rewards).flatten()

    def learn(self, run: Run, batch: Batch) -> dict[str, float]:
        """Take an optimizer step on each minibatch; return the metrics of the last."""
        metrics: dict[str, float] = {}
        for minibatch in run.minibatches(batch, self.num_minibatches):
            metrics = run.train.train_batch(
                minibatch,
                self.loss_fn(),
                token_weights=self.token_weights,
                max_length=self.max_length,
                temperature=self.temperature,
            )
        return metrics


class Run:
    """Trainer, sampler and data of one run."""

    def __init__(self, algorithm: Algorithm, options: argparse.Namespace) -> None:
        self.algorithm, self.options = algorithm, options
        self.num_problems, self.num_samples = options.problems, options.samples
        self.generator = torch.Generator().manual_seed(options.seed)
        self.path = quickstart_model(seed=options.seed)
        self.tokenizer = tokenizer_of(self.path)
        self.max_tokens = task.max_answer_tokens(self.tokenizer) + algorithm.extra_tokens
        self.training, self.held_out = (task.problems(one, seed=options.seed) for one in ("train", "held-out"))
        self.held_out = self.held_out[: options.held_out]
        self._engines: list[Any] = []
        self.train = self.build(algorithm.policy)
        sampler, small = rlcore.InferenceEngine(self.path, executor=options.sampler), SMALL.get(options.sampler, {})
        self.infer = self.keep(sampler.build(colocate_with=self.train, dtype="float32", **small))

    def keep(self, engine: Any) -> Any:
        """Close this engine when the run ends."""
        self._engines.append(engine)
        return engine

    def build(self, methods: type) -> rlcore.TrainEngine:
        """Return a train engine of the model with these methods; the first one's device is that of all."""
        kind: Any = type("Policy", (methods, model_class(self.path)), {})
        with rlcore.meta_device():
            module = kind.from_pretrained(self.path)
        place: dict[str, Any] = {"colocate_with": self.train} if self._engines else {}
        engine: rlcore.TrainEngine = self.keep(rlcore.TrainEngine(module, executor=self.options.trainer).build(**place))
        return engine

    def close(self) -> None:
        for engine in reversed(self._engines):
            engine.close()

    def imitate(self, num_steps: int) -> None:
        """Supervised warm-start with the answers of the algorithm's teacher."""
        for step in range(num_steps):
            self.train.set_rate(IMITATION_RATE * min(1, (step + 1) / 20))
            asked = task.draw(self.training, 256, self.generator)
            self.train.imitate(**task.answer_batch(asked, self.algorithm.teacher(self, asked), self.tokenizer))
        self.train.begin_reinforcement()
        self.train.set_rate(self.options.rate)
        self.train.sync_weights(self.infer)

    def sample(self, num_problems: int) -> Rollout:
        """Draw problems, and answer each of them ``--samples`` times."""
        problems = task.draw(self.training, num_problems, self.generator)
        outputs = self._generate(problems, n=self.num_samples, temperature=self.algorithm.temperature)
        reward = self.algorithm.reward
        rewards = [
            [reward(self, problem, answer.text) for answer in output.outputs]
            for problem, output in zip(problems, outputs, strict=True)
        ]
        return Rollout(problems, outputs, torch.tensor(rewards))

    def verify(self, problem: task.Problem, text: str) -> float:
        """Return 1 for the right answer, else 0."""
        return task.reward(problem, text)

    def score(self) -> Score:
        """Return the shares of right answers to problems whose answers are never trained on."""
        apart = torch.Generator().manual_seed(self.options.seed)  # a run samples the same however often it is scored so
        greedy = self._generate(self.held_out, temperature=0.0)
        sampled = self._generate(self.held_out, apart, n=SCORED_SAMPLES, temperature=1.0)
        return Score(self._share_right(greedy), self._share_right(sampled))

    def _share_right(self, outputs: list[Any]) -> float:
        pairs = zip(self.held_out, outputs, strict=True)
        answers = [(problem, answer.text) for problem, output in pairs for answer in output.outputs]
        return task.accuracy([problem for problem, _ in answers], [text for _, text in answers])

    def _generate(
        self, problems: list[task.Problem], generator: torch.Generator | None = None, **params: Any
    ) -> list[Any]:
        seeds = torch.randint(2**62, (len(problems),), generator=generator or self.generator).tolist()
        each = [{"max_tokens": self.max_tokens, "seed": seed} | params for seed in seeds]
        outputs: list[Any] = self.infer.generate(
            [task.prompt_text(problem) for problem in problems], each, progress=False
        )
        return outputs

    def minibatches(self, batch: Batch, count: int) -> list[Batch]:
        """Return the sequences of a batch, shuffled, in so many parts."""
        order = torch.randperm(len(batch["input_ids"]), generator=self.generator)
        return [{name: values[rows] for name, values in batch.items()} for rows in order.chunk(count)]

    def step(self) -> float:
        """Sample, learn and sync; return the mean reward."""
        rollout = self.algorithm.rollout(self)
        batch = rlcore.collate(rollout.outputs)
        self.algorithm.prepare(self, rollout, batch)
        self.algorithm.learn(self, batch)
        self.train.sync_weights(self.infer)
        return float(rollout.rewards.mean())


def arguments(algorithm: Algorithm, argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags of a program as ``Run`` takes them."""
    parser = argparse.ArgumentParser(description=type(algorithm).__doc__)
    numbers = {"steps": 30, "seed": 0, "problems": 32, "held-out": 512}
    for name, number in (numbers | {"samples": algorithm.samples, "imitation": algorithm.imitation}).items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--rate", type=float, default=algorithm.rate, help="the learning rate")
    parser.add_argument("--trainer", default="fsdp2", help="the train executor")
    parser.add_argument("--sampler", default="hf", help="the inference executor")
    parser.add_argument("--record", type=Path, help="a file for what is printed, as JSON")
    return parser.parse_args(argv)


@host_threads(1)  # the model is small: more threads of the host would wait for each other
def main(algorithm: Algorithm, argv: list[str] | None = None) -> Outcome:
    """Run the algorithm; print, and return, what it does to the score."""
    run = Run(algorithm, arguments(algorithm, argv))
    rewards: list[float] = []
    try:
        run.imitate(run.options.imitation)
        algorithm.begin(run)
        before = run.score()
        print(f"score {before} at the beginning", flush=True)
        for step in range(1, run.options.steps + 1):
            rewards.append(run.step())
            if step % 5 == 0:
                print(f"step {step:3}  reward {rewards[-1]:.3f}", flush=True)
        after = run.score()
        print(f"score {after} after {run.options.steps} steps of {type(algorithm).__name__}", flush=True)
    finally:
        run.close()
    outcome = Outcome(*before, rewards, *after)
    if run.options.record:
        run.options.record.write_text(json.dumps(outcome._asdict()))
    return outcome


def reference_of(run: Run) -> rlcore.TrainEngine:
    """Return an engine of the weights that the policy has now, which does not train."""
    reference = run.build(_Frozen)
    reference.load_state_dict(run.train.state_dict())
    return reference


class _Frozen(PolicyMethods):
    def on_weights_materialized(self) -> None:
        """Make no optimizer."""
