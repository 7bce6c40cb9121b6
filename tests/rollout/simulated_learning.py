"""The cost of staleness: the quickstart's task with a small network, on a clock that is simulated.

    python -m tests.rollout.simulated_learning SEED...     prints the numbers of docs/rollout.md by bound and seed

Loss, advantage, staleness bound and pacing are rlcore's. Three tokens of an answer (units, tens, whether there is a
hundred) come of a network with two hidden layers, so that a run takes a second. The clock: a step of the trainer takes
``STEP_S``; a group of 8 answers takes ``group_s``, one after the other, with the weights of that moment.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlcore.ops import decoupled_ppo, group_advantage
from rlcore.quickstart import task
from rlcore.rollout import StalenessBound
from rlcore.rollout.pacing import Pacing

GROUPS, SAMPLES, MINIBATCHES, RATE, STEP_S = 32, 8, 4, 1e-3, 0.59
_PARTS = (10, 10, 2)
BOUNDS = [(bound, True) for bound in (0, 1, 2, 4, 8)] + [(bound, False) for bound in (2, 4, 8)]
"""Staleness, and whether the samplers are paced."""


class Network(nn.Module):
    """Log-probs of the parts of an answer."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(40, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, sum(_PARTS))
        )

    def forward(self, features: Tensor) -> list[Tensor]:
        return [part.log_softmax(-1) for part in self.layers(features).split(_PARTS, -1)]

    def logprobs(self, features: Tensor, answers: Tensor) -> Tensor:
        parts = self(features)
        return torch.stack([part.gather(1, answers[:, i : i + 1])[:, 0] for i, part in enumerate(parts)], 1)


@dataclass(frozen=True)
class Group:
    """Answers to one problem."""

    features: Tensor
    answers: Tensor
    logprobs: Tensor
    rewards: Tensor


@dataclass(frozen=True)
class Learned:
    """What became of a run."""

    accuracy: float
    seconds: float
    waited: float
    staleness: float
    steps: int


def features_of(problems: list[task.Problem]) -> Tensor:
    digits = torch.tensor([[p.a // 10, p.a % 10, p.b // 10, p.b % 10] for p in problems])
    return nn.functional.one_hot(digits, 10).flatten(1).float()


def answers_of(texts: list[str]) -> Tensor:
    return torch.tensor([[int(text[0]), int(text[1]), int(len(text) > 2)] for text in texts])


def imitated(seed: int, steps: int = 1200) -> Network:
    """Return a network that imitates the forgetful teacher."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Network()
    generator, problems = torch.Generator().manual_seed(seed), task.problems("train", seed=seed)
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3, betas=(0.9, 0.95))
    for _ in range(steps):
        asked = task.draw(problems, 256, generator)
        answers = answers_of(task.teacher_texts(asked, generator))
        loss = -network.logprobs(features_of(asked), answers).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network


class Run:
    """One run of reinforcement learning.

    Args:
        network: where it begins; it is copied.
    """

    def __init__(self, network: Network, seed: int, *, max_staleness: int, pacing: bool, group_s: float) -> None:
        self.network, self._group_s = copy.deepcopy(network), group_s
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._optimizer = torch.optim.AdamW(self.network.parameters(), RATE)
        problems, held_out = task.problems("train", seed=seed), task.problems("held-out", seed=seed)
        self._features, self._right = features_of(problems), answers_of(list(map(task.answer_text, problems)))
        self._held_out = features_of(held_out), answers_of(list(map(task.answer_text, held_out)))
        self._bound = StalenessBound(max_staleness=max_staleness, batch_size=GROUPS)
        self._pacing = Pacing(self._bound) if pacing else None
        self._clock = self._sampler_at = self._waited = 0.0
        self._order: list[int] = []
        self._queued: list[int] = []
        self._groups: dict[int, Group] = {}
        self._next_number = 0
        self._staleness: list[int] = []

    def learn(self, *, steps: int | None = None, seconds: float | None = None) -> Learned:
        """Take so many steps, or as many as end in that time."""
        done = 0
        while done != steps and (seconds is None or self._clock + STEP_S <= seconds):
            self._step()
            done += 1
        lag = sum(self._staleness) / len(self._staleness)
        return Learned(self._accuracy(), self._clock, self._waited / self._clock, lag, done)

    def _step(self) -> None:
        bound, came = self._bound, self._clock
        if self._pacing:
            self._pacing.note_wait(GROUPS)
        while not (chosen := bound.choose(GROUPS)):
            self._sample_until(self._clock + self._group_s)
        self._waited += self._clock - came
        self._staleness += [bound.version - bound.ready[number] for number in chosen]
        bound.give(chosen)
        self._sample_until(self._clock + STEP_S)  # beside the trainer, with the weights of before
        self._train([self._groups.pop(number) for number in chosen])
        if self._pacing:
            self._pacing.note_version()
        assert bound.set_version(bound.version + 1) == []

    def _sample_until(self, clock: float) -> None:
        while True:
            while self._bound.capacity:
                if not self._queued:
                    self._sampler_at = max(self._sampler_at, self._clock)  # it was idle
                self._bound.begin(self._next_number)
                self._queued.append(self._next_number)
                self._next_number += 1
            if not self._queued or self._sampler_at + self._group_s > clock + 1e-9:
                self._clock = max(self._clock, clock)
                return
            self._sampler_at += self._group_s
            self._sample(self._queued.pop(0))

    def _sample(self, number: int) -> None:
        """Sample a group; one of equal rewards has no advantage, and another takes its place."""
        if not self._order:
            self._order = torch.randperm(len(self._features), generator=self._generator).tolist()
        row = self._order.pop()
        features = self._features[row].expand(SAMPLES, -1)
        with torch.no_grad():
            parts = self.network(features)
            answers = torch.cat([torch.multinomial(p.exp(), 1, generator=self._generator) for p in parts], 1)
            group = Group(
                features,
                answers,
                self.network.logprobs(features, answers),
                (answers == self._right[row]).all(1).float(),
            )
        if 0 < group.rewards.sum() < SAMPLES:
            assert self._bound.end(number, self._bound.version)
            self._groups[number] = group
        else:
            self._bound.drop(number)

    def _train(self, groups: list[Group]) -> None:
        features, answers = torch.cat([one.features for one in groups]), torch.cat([one.answers for one in groups])
        sampled = torch.cat([one.logprobs for one in groups])
        advantages = group_advantage(torch.stack([one.rewards for one in groups])).view(-1, 1).expand_as(sampled)
        with torch.no_grad():
            proximal = self.network.logprobs(features, answers)
        loss_fn = decoupled_ppo()
        for rows in torch.randperm(len(features), generator=self._generator).chunk(MINIBATCHES):
            entries = {"old_logprobs": proximal, "rollout_logprobs": sampled, "advantages": advantages}
            per_token = {name: values[rows].flatten() for name, values in entries.items()}
            loss, _ = loss_fn(self.network.logprobs(features[rows], answers[rows]).flatten(), None, per_token)
            self._optimizer.zero_grad()
            loss.mean().backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self._optimizer.step()

    def _accuracy(self) -> float:
        features, right = self._held_out
        with torch.no_grad():
            greedy = torch.stack([part.argmax(1) for part in self.network(features)], 1)
        return float((greedy == right).all(1).float().mean())


def main(seeds: list[int]) -> None:
    for seed in seeds:
        network = imitated(seed)
        for max_staleness, pacing in BOUNDS:
            found = Run(network, seed, max_staleness=max_staleness, pacing=pacing, group_s=0.005).learn(steps=40)
            print(seed, max_staleness, pacing, found, flush=True)
            if max_staleness == 0:
                synchronous_s = found.seconds
        found = Run(network, seed, max_staleness=8, pacing=True, group_s=0.005).learn(seconds=synchronous_s)
        print(seed, 8, True, found, "at equal time", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([int(one) for one in sys.argv[1:]])
