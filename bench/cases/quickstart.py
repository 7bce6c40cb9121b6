"""The whole of ``rlcore quickstart``, as a user starts it: a new process, with nothing in the cache.

Each run is another seed. A run that does not learn, or whose sampler and trainer disagree, has no number; neither has
a control (rewards shuffled within each group) that does learn.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.startup import RLCORE
from rlcore.bench.measurement.measure import processor_s_of_children
from rlcore.device import Device
from rlcore.process.python_command import python_code

STEPS = 100
SEEDS = (0, 1, 2, 3, 4)
ACCURACY = 0.98
"""Greedy, on held-out problems, that a run must reach."""
CONTROL_GAIN = 0.05
"""The gain in accuracy that the control must not exceed."""
PARITY = 5e-4
"""Nats between the log-probs of sampler and trainer, in float32. Unlikely tokens have logits of some tens, which round
by up to 1e-4; a wrong temperature or position makes more than 1e-2."""
PHASES = ("generate", "train", "sync", "offload")

_TIMEOUT_S = 1800.0

Steps = list[dict[str, float]]
"""A run's metrics.jsonl: before training first, then each step."""


@dataclass(frozen=True, slots=True)
class QuickstartRun:
    """One run of the command that ended well."""

    steps: Steps
    processor_s: float
    """User and system time of all threads on the host: it grows less than the clock when others use the machine."""


def quickstart(device: str, seed: int, *options: str) -> QuickstartRun:
    """Run the command in a folder that is removed afterwards; raises RuntimeError with its output when it fails."""
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as folder:
        output = Path(folder, "run")
        arguments = ["--device", device, "--seed", str(seed), "--steps", str(STEPS), "--output", str(output), *options]
        before_s = processor_s_of_children()
        result = subprocess.run(
            python_code(RLCORE, "quickstart", *arguments),
            env=os.environ | {"RLCORE_CACHE": str(Path(folder, "cache"))},
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        if result.returncode != 0:
            said = result.stderr.replace(folder, "<folder>").strip()[-2000:]
            raise RuntimeError(f"rlcore quickstart --seed {seed} ended with exit code {result.returncode}: {said}")
        steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        return QuickstartRun(steps, processor_s_of_children() - before_s)


def accuracies(steps: Steps) -> tuple[float, float]:
    """Return the accuracies before the first step and after the last."""
    measured = [metrics["accuracy"] for metrics in steps if "accuracy" in metrics]
    return measured[0], measured[-1]


def parity(steps: Steps) -> float:
    return max(metrics["parity"] for metrics in steps[1:])


def quantities(run: QuickstartRun) -> dict[str, Quantity]:
    steps = run.steps
    before, after = accuracies(steps)
    seconds = {phase: sum(metrics[f"{phase}_s"] for metrics in steps[1:]) for phase in PHASES}
    tokens = sum(metrics["tokens_per_s"] * metrics["generate_s"] for metrics in steps[1:])
    return {
        "processor": Quantity(run.processor_s, "s"),
        "accuracy_before": Quantity(before, "1"),
        "accuracy_after": Quantity(after, "1"),
        "imitation_steps": Quantity(steps[0]["imitation_steps"], "step"),
        "parity_max": Quantity(parity(steps), "nat"),
        "generated_tokens_per_s": Quantity(tokens / seconds["generate"], "token/s"),
        **{phase: Quantity(seconds[phase], "s") for phase in PHASES},
    }


def check_same_distribution(run: QuickstartRun) -> None:
    expect([metrics["step"] for metrics in run.steps] == list(range(STEPS + 1)), "steps are missing")
    # Two programs never round alike throughout: 0 would mean that nothing was compared.
    expect(0 < parity(run.steps) <= PARITY, f"log-probs of sampler and trainer differ by {parity(run.steps):.2e}")


def check_learned(run: QuickstartRun) -> None:
    check_same_distribution(run)
    after = accuracies(run.steps)[1]
    expect(after >= ACCURACY, f"held-out accuracy is {after:.1%}, less than {ACCURACY:.0%}")


def check_learned_nothing(run: QuickstartRun) -> None:
    check_same_distribution(run)
    before, after = accuracies(run.steps)
    expect(after - before <= CONTROL_GAIN, f"the control went from {before:.1%} to {after:.1%}")


def _work(seeds: tuple[int, ...], run: Callable[[int], QuickstartRun], check: Callable[[QuickstartRun], None]) -> Work:
    left = iter(seeds)
    # The two executors that the quickstart uses.
    contender = Contender("fsdp2+hf", lambda: run(next(left)), check, quantities=quantities)
    params: dict[str, int | float | str] = {"steps": STEPS, "seeds": ",".join(map(str, seeds))}
    return Work((contender,), params, num_runs=len(seeds))


def _prepare_learns(device: Device) -> Work:
    return _work(SEEDS, lambda seed: quickstart(device.name, seed), check_learned)


def _prepare_control(device: Device) -> Work:
    return _work(SEEDS[:1], lambda seed: quickstart(device.name, seed, "--shuffle-rewards"), check_learned_nothing)


cases = (
    Case(
        "quickstart/learns",
        "rlcore quickstart from start to end, a run for each of five seeds",
        _prepare_learns,
        effort="full",
        estimate_s=400.0,
        timeout_s=6 * _TIMEOUT_S,
    ),
    Case(
        "quickstart/control",
        "the same with shuffled rewards, which must learn nothing",
        _prepare_control,
        effort="full",
        estimate_s=80.0,
        timeout_s=2 * _TIMEOUT_S,
    ),
)
