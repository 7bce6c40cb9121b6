"""What the controller costs: processor time of a step with an engine that answers at once.

    python -m tests.rollout.controller_cost     prints numbers for docs/rollout.md

A step: 32 groups of 8 samples are asked for, made into trajectories, given and collated, and an update of the weights
is noted. The engine has made its answers before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rlcore.engines.sampling.completion import Completion, RequestOutput, VersionSpan
from rlcore.rollout import RolloutController, SingleTurn, collate_trajectories
from tests.rollout.simulated_engine import SimulatedEngine, SimulatedTrainer

GROUPS, SAMPLES, PROMPT, STEPS, WARM_UP = 32, 8, 6, 60, 10


class ReadyEngine(SimulatedEngine):
    """Answers each request in the next ``collect``, with the same tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._waiting: list[int] = []
        self._answers: dict[int, RequestOutput] = {}

    def submit(self, prompts: Sequence[Any], sampling_params: Sequence[Any], *, max_in_flight: int) -> list[int]:
        numbers = list(range(self._next_number, self._next_number + len(prompts)))
        self._next_number += len(prompts)
        self._waiting += numbers
        return numbers

    def collect(self, timeout_s: float | None = None) -> Mapping[int, RequestOutput]:
        found = dict.fromkeys(self._waiting, self._answer())
        self._waiting = []
        return found

    def _answer(self) -> RequestOutput:
        if self.version not in self._answers:
            ids, logprobs = list(range(self._tokens)), [-0.5 - i * 1e-3 for i in range(self._tokens)]
            spans = (VersionSpan(self.version, 0, self._tokens),)
            completions = [Completion(ids, logprobs, "7", "length", spans) for _ in range(SAMPLES)]
            self._answers = {self.version: RequestOutput(None, list(range(PROMPT)), completions)}
        return self._answers[self.version]


def reward(data: Any, text: str) -> float:
    return float(len(text))


def measured(tokens: int) -> dict[str, float]:
    """Return milliseconds of a step, the median of many: all of the process, and the collation."""
    all_ms, collation_ms = [], []
    items = [{"prompt": list(range(PROMPT))}]
    workflow, trainer = SingleTurn(reward, {"n": SAMPLES, "max_tokens": tokens}), SimulatedTrainer()
    with RolloutController(ReadyEngine(tokens), workflow, batch_size=GROUPS, max_staleness=1) as rollout:
        for _ in range(STEPS):
            time.sleep(0.03)  # the trainer's work, in which the next batch is made
            began = time.process_time()
            episodes = rollout.prepare_episodes(items)
            own = time.thread_time()
            collate_trajectories([one.trajectories for one in episodes])
            collation_ms.append((time.thread_time() - own) * 1e3)
            rollout.update_weights(trainer)
            while rollout._bound.running or rollout._bound.capacity:
                time.sleep(0.001)
            all_ms.append((time.process_time() - began) * 1e3)
    whole, collation = median(all_ms[WARM_UP:]), median(collation_ms[WARM_UP:])
    return {"controller": whole - collation, "collation": collation}


def main() -> None:
    for tokens in (5, 512):
        found = measured(tokens)
        print(tokens, "tokens:", ", ".join(f"{name} {ms:.1f} ms" for name, ms in found.items()), flush=True)


if __name__ == "__main__":
    main()
