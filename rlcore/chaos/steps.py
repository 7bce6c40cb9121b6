"""The steps of a program: each is a use of the engines by their public methods, and checks its own result."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from rlcore.chaos.channel import run_rounds
from rlcore.chaos.checks import require, same
from rlcore.chaos.engines import PROMPTS, Engines
from rlcore.errors import CheckpointError, UnsupportedError
from rlcore.process.python_command import python_command

Step = Callable[[Engines, random.Random], None]


def build(engines: Engines, draw: random.Random) -> None:
    engines.close()
    engines.build()


def call(engines: Engines, draw: random.Random) -> None:
    given = torch.full((draw.choice([10, 300_000]),), float(draw.randrange(100)))
    for _ in range(5):
        for found in engines.train.call("echo", {"tensor": given, "text": "x" * 1000}):
            require(torch.equal(found["tensor"], given), "a call returned another tensor than it was given")


def train(engines: Engines, draw: random.Random) -> None:
    for _ in range(2):
        metrics = engines.learn(draw)
        require(metrics["num_tokens"] > 0, f"train_batch() trained on no token: {metrics}")


def generate(engines: Engines, draw: random.Random) -> None:
    for output in engines.infer.generate(
        PROMPTS * 8, {"max_tokens": 12, "seed": 1, "ignore_eos": True}, progress=False
    ):
        require(len(output.outputs[0].token_ids) == 12, "a completion has another number of tokens than was asked for")


def offload(engines: Engines, draw: random.Random) -> None:
    """Both engines go to the host and come back."""
    before = engines.train.state_dict()
    try:
        engines.train.offload()
        engines.infer.offload()
    except UnsupportedError:  # weights of a host that a sync has shared
        engines.train.onload()
    engines.infer.onload()
    engines.train.onload()
    require(same(engines.train.state_dict(), before), "weights came back from the host changed")


def sync(engines: Engines, draw: random.Random) -> None:
    route = None if engines.are_together else draw.choice([None, "packed", "collective"])
    staging_bytes = draw.choice([None, 1 << 15])  # one bucket, or a dozen
    engines.renew_weights()
    engines.train.sync_weights(engines.infer, route=route, staging_bytes=staging_bytes, timeout_s=engines.patience_s)


def save(engines: Engines, draw: random.Random) -> None:
    engines.save()


def save_in_background(engines: Engines, draw: random.Random) -> None:
    """Save while training goes on, or wait for the save at once."""
    number = engines.begin_save()
    pending = engines.train.save(engines.checkpoints, {"number": number}, blocking=False)
    engines.between()
    if draw.random() < 0.5:
        engines.learn(draw)
    pending.result()
    engines.end_save(number)


def load(engines: Engines, draw: random.Random) -> None:
    """Go back to a checkpoint after a step beyond it; after an error nothing has changed."""
    before = engines.train.call("sums")
    try:
        extra = engines.train.load(engines.checkpoints)
    except Exception:
        _check_unchanged(engines, before)
        raise
    require(extra.get("number") in engines.last, f"load() returned {extra}, where {engines.last} was saved last")
    is_same = same(engines.train.state_dict(), engines.saves[extra["number"]])
    require(is_same, "load() took weights that are not those of the save: damage was not found")
    engines.has_saved = True


def _check_unchanged(engines: Engines, before: list[list[float]]) -> None:
    try:
        now = engines.train.call("sums")
    except Exception:  # the workers have ended
        return
    require(now == before, "load() failed, and has changed weights or optimizer before")


def close(engines: Engines, draw: random.Random) -> None:
    """Close both engines, perhaps with a save under way."""
    if draw.random() < 0.5:
        number = engines.begin_save()
        engines.train.save(engines.checkpoints, {"number": number}, blocking=False)
    engines.between()
    engines.close()


def two_savers(engines: Engines, draw: random.Random) -> None:
    """Another program saves into the same folder at the same time. A save may fail, and no checkpoint is lost."""
    numbers = [engines.begin_save() for _ in range(6)]
    own, others = numbers[:3], numbers[3:]
    engines.saves |= dict.fromkeys(others, engines.initial)
    command = python_command("rlcore.chaos.program:save_again", engines.scratch, engines.layout.trainers[0], *others)
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert other.stdout is not None
    other.stdout.readline()  # it is ready
    with other, ThreadPoolExecutor(1) as beside:
        ended = beside.submit(other.communicate, "go\n", 200)
        num_saved = sum(_has_saved(engines, number) for number in own)
        said, errors = ended.result()
    require(other.returncode == 0, f"the other program failed: {errors[-500:]}")
    engines.last = set(numbers) if num_saved + int(said) else engines.last
    require((engines.checkpoints / "manifest.json").exists() or not num_saved, "a checkpoint was lost")


def _has_saved(engines: Engines, number: int) -> bool:
    try:
        engines.train.save(engines.checkpoints, {"number": number})
    except CheckpointError:
        return False
    return True


def list_processes(engines: Engines, draw: random.Random) -> None:
    """``rlcore ps`` shows the program's workers, and no character that a terminal would obey."""
    shown = _command("ps")
    require(shown.returncode == 0, f"`rlcore ps` failed: {shown.stderr}")
    require("\x1b" not in shown.stdout, f"`rlcore ps` prints escapes: {shown.stdout!r}")
    for worker in engines.train.executors[0].workers:
        require(str(worker.process_id) in shown.stdout, f"`rlcore ps` does not show worker {worker.process_id}")


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlcore", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)


def channel(engines: Engines, draw: random.Random) -> None:
    """Sync a sender and a receiver of a program without engines, over a control channel of its own."""
    run_rounds(engines.mischief, draw)


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (
        build,
        call,
        train,
        generate,
        offload,
        sync,
        save,
        save_in_background,
        load,
        close,
        two_savers,
        list_processes,
        channel,
    )
}
