"""Steps of GRPO of a 1.5B with vLLM, to be traced, and what that costs: ``python -m tests.trace.whole_steps FILE``.

Under ``rlcore trace`` the first steps are the trace. Further steps are by turns with and without a recorder, so that
both meet the same machine; FILE gets their seconds as JSON. On a host the model is tiny.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import rlcore
from rlcore import spans
from rlcore.bench.cases.models import QWEN_1_5B, TINY, Folder
from rlcore.bench.cases.peers.race import RaceLoad
from rlcore.bench.cases.peers.race_sides import RlcoreLoop, Stopwatch
from rlcore.registry import get_device

_TRACED, _EACH = 6, 8
"""Steps of the trace, and steps with and without a recorder."""


def main(file: str, new_tokens: str = "256") -> None:
    device = rlcore.get_device()
    is_host = device.spec.is_host
    folder = Folder(TINY if is_host else QWEN_1_5B, torch.float32 if is_host else torch.bfloat16, device)
    sizes = {"prompts": 2, "samples": 4, "prompt_tokens": 8, "kv_cache_bytes": 1 << 26} if is_host else {"prompts": 16}
    vocabulary = (TINY if is_host else QWEN_1_5B).vocabulary
    load = RaceLoad(str(folder.path), device.name, vocabulary, new_tokens=int(new_tokens), offloads=True, **sizes)
    watch, loop = Stopwatch(get_device(load.device)), RlcoreLoop(load)

    def step() -> float:
        device.synchronize()
        started = time.perf_counter()
        with rlcore.span("step"):
            loop.step(watch)
        device.synchronize()
        return time.perf_counter() - started

    traced = [step() for _ in range(_TRACED)]
    print("traced steps", " ".join(f"{one:.3f}" for one in traced), flush=True)
    of_trace, seconds = spans.recorder, {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as elsewhere:
        another = spans.Recorder(Path(elsewhere))
        for _ in range(_EACH):
            for name, recorder in (("with", another), ("without", None)):
                spans.recorder = recorder
                seconds[name].append(step())
        (lines,) = (one.read_text().count("\n") for one in Path(elsewhere).iterdir())
    spans.recorder = of_trace
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    overhead = medians["with"] / medians["without"] - 1
    print(f"step {medians['without']:.4f} s, with a trace {medians['with']:.4f} s, {overhead:+.2%}")
    print(f"{lines / _EACH:.0f} lines a step; {lines} in all")
    Path(file).write_text(json.dumps({"traced": traced, "seconds": seconds, "lines": lines, "span_s": _span_s()}))
    with contextlib.suppress(Exception):  # the numbers are there
        loop.close()
    folder.close()


def _span_s() -> float:
    """Return the seconds of one span in a loop."""
    count = 10_000
    with tempfile.TemporaryDirectory() as folder:
        recorder = spans.Recorder(Path(folder))
        started = time.perf_counter()
        for _ in range(count):
            with spans.OpenSpan(recorder, "step", {"number": 1}):
                pass
        return (time.perf_counter() - started) / count


if __name__ == "__main__":
    main(*sys.argv[1:])
