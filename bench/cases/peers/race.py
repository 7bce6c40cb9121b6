"""The race: steps of GRPO from end to end, by rlcore's engines with vLLM and by TRL's GRPOTrainer with vLLM.

TRL runs by itself, and after ``accelerate_trl``, rlcore's line of adoption. rlcore runs with its trainer on the device,
and with the trainer in host memory while vLLM samples. All sides have one device, the same
model folder, prompts, completions of the same number and length, optimizer and precision, and each the settings that
its own documentation gives for speed. A side is a program of its own, so that it has the device to itself
(``race_sides.py``).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlcore.bench import steps
from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_1_5B, QWEN_7B, TINY, Folder, ModelShape
from rlcore.device import Device
from rlcore.errors import BenchError, MissingDependencyError
from rlcore.process.python_command import python_command
from rlcore.process.status import family_of

PHASES = ("generate", "sync", "old_logprob", "rest")
"""The parts of a step that all sides tell. "rest": rewards, the update, and what moves between host and device.

rlcore's side needs no "old_logprob": with one optimizer step a batch the old policy is the one that is trained.
"""
OFFLOADED = ", offloaded"
SIDES = {
    "rlcore": "rlcore_side",
    f"rlcore{OFFLOADED}": "rlcore_side",
    "trl": "trl_side",
    "trl+rlcore": "adopted_side",
}
"""The functions of ``race_sides`` by the names of their results."""
_SAID = 2000


@dataclass(frozen=True, slots=True)
class RaceLoad:
    """The work of a side, told to it as JSON."""

    folder: str
    device: str
    vocabulary: int
    prompts: int = 32
    samples: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 512
    """The tokens of every completion: neither side gains from lengths that differ."""
    sequences_at_once: int = 16
    """Sequences of a micro-batch, on all sides."""
    offloads: bool = False
    """The trainer is in host memory while vLLM samples; else it stays on the device, and vLLM alone leaves."""
    recomputes: bool = False
    """Compute activations again in the backward, for models that have no room for them."""
    kv_cache_bytes: int = 8 << 30
    steps: int = 4

    @property
    def max_length(self) -> int:
        return self.prompt_tokens + self.new_tokens

    @property
    def num_tokens(self) -> int:
        """New tokens of a step."""
        return self.prompts * self.samples * self.new_tokens


@dataclass(frozen=True, slots=True)
class SideTimes:
    """The seconds of each step and of its phases, without the first step, and the most memory used."""

    seconds: list[float]
    phases: dict[str, list[float]]
    peak_bytes: int
    parity: float
    """The mean difference of log-probs, in nats a token, between sampler and trainer in the last step."""


class TimeLeft:
    """The time of a case: each side may take an equal share of what is left, so that one that hangs ends alone."""

    def __init__(self, seconds: float, num_sides: int) -> None:
        self._end = time.monotonic() + seconds
        self._num_sides = num_sides

    def next_share(self) -> float:
        """Return the seconds that the next side may take."""
        share = max(0.0, self._end - time.monotonic()) / self._num_sides
        self._num_sides -= 1
        return share


def _run(side: str, load: RaceLoad, left: TimeLeft) -> SideTimes:
    timeout_s = left.next_share()
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as folder:
        result = Path(folder, "times.json")
        log = Path(folder, "log.txt")
        command = python_command(f"rlcore.bench.cases.peers.race_sides:{side}", json.dumps(asdict(load)), result)
        try:
            ended = f"ended with exit code {_exit_code(command, log, timeout_s)}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within the {timeout_s:.0f} s that it had"
        if not result.exists():  # it is written whole and last: how a library ends after that changes no time
            said = log.read_text("utf-8", "replace").strip()
            raise BenchError(f"{side} {ended}: {said[-_SAID:]}")
        return SideTimes(**json.loads(result.read_text()))


def _exit_code(command: Sequence[str], log: Path, timeout_s: float) -> int:
    """Run a side in the folder of its log.

    Raises subprocess.TimeoutExpired: it was killed, with all that it had started, which would keep the device. A
    session of its own would do as well for that, but who ends the whole case would not reach it.
    """
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=log.parent, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            return process.wait(timeout_s)
        except BaseException:
            for pid in family_of(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise


def _check(times: SideTimes) -> None:
    expect(0 <= times.parity < 0.1, f"log-probs of sampler and trainer differ by {times.parity:.2e} nats in the mean")


def _quantities(times: SideTimes, num_tokens: int) -> Mapping[str, Quantity]:
    phases = {name: Quantity(times.phases[name], "s") for name in PHASES if any(times.phases[name])}
    return phases | {
        "new_tokens": Quantity([num_tokens / seconds for seconds in times.seconds], "token/s"),
        "steps_per_hour": Quantity([3600 / seconds for seconds in times.seconds], "1/h"),
        "peak": Quantity(float(times.peak_bytes), "B"),
    }


def _contender(name: str, load: RaceLoad, left: TimeLeft) -> Contender:
    load = replace(load, offloads=name.endswith(OFFLOADED))
    return Contender(
        name,
        functools.partial(_run, SIDES[name], load, left),
        _check,
        seconds=lambda times: times.seconds,
        quantities=lambda times: _quantities(times, load.num_tokens),
        params={"trainer": "offloaded while vLLM samples" if load.offloads else "on the device"},
    )


def _prepare(
    shape: ModelShape, names: Sequence[str], limit_s: float, changes: Mapping[str, Any], device: Device
) -> Work:
    try:
        import trl
        import vllm
    except ImportError as error:
        raise MissingDependencyError(error.name or "trl", needed_for="this case", extra="vllm") from error
    is_host = device.spec.is_host
    shape = TINY if is_host else shape
    if is_host:
        changes = {"prompts": 2, "samples": 4, "prompt_tokens": 8, "new_tokens": 12, "sequences_at_once": 4,
            "kv_cache_bytes": 1 << 26}  # fmt: skip
    left = TimeLeft(limit_s, len(names))
    steps.begin("model folder")
    folder = Folder(shape, torch.float32 if is_host else torch.bfloat16, device)
    load = replace(RaceLoad(str(folder.path), device.name, shape.vocabulary), **changes)
    counts = ("prompts", "samples", "prompt_tokens", "new_tokens", "sequences_at_once")
    shown = {name: getattr(load, name) for name in counts}
    shown["recompute"] = str(load.recomputes)
    params = {"model": shape.name, **shown, "devices": 1, "trl": trl.__version__, "vllm": vllm.__version__}
    return Work(tuple(_contender(name, load, left) for name in names), params, num_runs=1, close=folder.close)


def _case(
    name: str, shape: ModelShape, names: Sequence[str], estimate_s: float, limit_s: float, **changes: Any
) -> Case:
    """Return a case.

    Args:
        estimate_s: of its sides when nothing hangs.
        limit_s: it ends within so many seconds whatever hangs, so that what was measured is kept: the estimate and a
            margin, and less than ``Case.timeout_s``, which would end all sides.
    """
    description = f"steps of GRPO, {shape.name} shapes (tiny on a host), beside TRL's GRPOTrainer, all with vLLM"
    return Case(
        f"race/{name}",
        description,
        functools.partial(_prepare, shape, names, limit_s, changes),
        effort="full",
        estimate_s=estimate_s,
        device_estimate_s=estimate_s,
    )


# A side takes two minutes: those that few ask for are cases of their own.
cases = (
    _case("1.5b", QWEN_1_5B, ("rlcore", "trl"), 230.0, 330.0),
    _case("1.5b_accelerate_trl", QWEN_1_5B, ("trl+rlcore",), 130.0, 190.0),
    _case("1.5b_offloaded", QWEN_1_5B, (f"rlcore{OFFLOADED}",), 130.0, 190.0),
    _case("7b", QWEN_7B, ("rlcore", "trl"), 330.0, 385.0, prompts=16, sequences_at_once=8, recomputes=True, steps=3),
)
