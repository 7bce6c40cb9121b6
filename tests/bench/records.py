"""Records for tests of what reads them: every kind of case, with plausible numbers that nobody measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rlcore.bench.record import Calibration, CaseResult, Metric, Record, read

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
UNITS = {"new_tokens": "token/s", "trained_tokens": "token/s", "bubble": "1", "bus_bandwidth": "B/s"}
STEP = {"generate": 3.0, "old_logprob": 0.5, "update": 2.0, "sync": 0.1, "switch": 0.8, "reward": 0.05}


def result(
    name: str, implementation: str, time: float, params: dict[str, Any] | None = None, **values: Any
) -> CaseResult:
    fields = {key: values.pop(key) for key in ("limits", "marks") if key in values}
    spread = (0.98, 1.0, 1.01)
    metrics = [Metric(name="time", unit="s", samples=[time * factor for factor in spread])]
    metrics += [Metric(name=key, unit=UNITS.get(key, "s"), samples=[value] * 3) for key, value in values.items()]
    return CaseResult(
        name=name, implementation=implementation, status="pass", params=params or {}, metrics=metrics, **fields
    )


def a_record(speed: float = 1.0, **system: Any) -> Record:
    """Of a machine that is ``speed`` times as fast as another."""
    found = read(RESULTS / "startup-cpu.json")
    step = {name: seconds / speed for name, seconds in STEP.items()}
    model = {"model": "qwen2-tiny", "prompts": 4, "samples": 4, "devices": 1}
    cases = [
        result("rl/step", "fsdp2+hf", 6.5 / speed, model, **step, bubble=0.15, trained_tokens=1000 * speed),
        result("rollout/hf", "hf", 2.0 / speed, model, new_tokens=4000.0 * speed),
        result("train/step", "fsdp2", 0.5 / speed, model, limits={"product/float32": 10**10}),
        result("kernels/linear_logprob/8b", "chunked", 0.05 / speed, limits={"product/float32": 10**9}),
        result("kernels/linear_logprob/8b", "a peer 1.0 with a long name, without entropy", 0.06 / speed),
        result("memory/bandwidth", "copy", 0.02, limits={"memory": 10**8}, marks=["shared: others used the host"]),
        result("memory/bandwidth", "fill", 0.02, limits={"memory": 10**8}),
        *(
            result("product/sweep", "torch.mm", N**3 / 4e9 / speed, {"K": N, "dtype": dtype}, limits={
                f"product/{dtype}": 2 * N**3
            })
            for dtype in ("float32", "bfloat16") for N in (256, 1024, 4096)
        ),
        *(
            result(f"collectives/{op}", "gloo", 1e-4 + n / 1e9, {"bytes": n}, bus_bandwidth=n / (1e-4 + n / 1e9))
            for op in ("all_reduce", "all_gather") for n in (8, 4096, 1 << 20, 1 << 24)
        ),
        CaseResult(name="copies/to_device", implementation="", status="blocked", params={}, reason="it is the host"),
        CaseResult(name="kernels/gae", implementation="scan", status="fail", params={}, reason="<b>wrong</b>\nby far"),
    ]  # fmt: skip
    limits = {"product/float32": 5e10, "product/bfloat16": 1e11, "memory": 1e10}
    calibration = Calibration(measured_at="2026-11-21T12:00:00+00:00", limits=limits, blocked={"link": "one device"})
    changed = msgspec.structs.replace(found.system, **system)
    return msgspec.structs.replace(found, cases=cases, calibration=calibration, system=changed)
