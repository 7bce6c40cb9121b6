"""The seconds of a planned step, from what a record of ``rlcore bench`` has measured.

A rate of computing is the floating-point operations of a measured step, counted as the plan counts them, over its
seconds. The range is that of all training steps in the record. What the record has not measured gets no seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rlcore.bench.cases.models import QWEN_0_5B, QWEN_1_5B, QWEN_7B
from rlcore.bench.record import Record, read
from rlcore.errors import InvalidInputError
from rlcore.planning.hardware import Hardware
from rlcore.planning.model import planned_model
from rlcore.planning.step import StepPlan
from rlcore.planning.traces import Traces

Range = tuple[float, float]
_SHAPES = {shape.name: shape for shape in (QWEN_0_5B, QWEN_1_5B, QWEN_7B)}
_RECOMPUTE = {"True": True, "False": False}


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a record, each as the least and the most."""

    flops_per_s: Range | None
    sync_bytes_per_s: Range | None
    host_bytes_per_s: Range | None

    @classmethod
    def of(cls, file: str | os.PathLike[str], device: Hardware) -> Rates:
        """Read a record.

        Raises:
            BenchError: it is none.
            InvalidInputError: it has neither training steps nor weight syncs.
        """
        record = read(Path(file))
        rates = cls(_range(_step_rates(record, device)), _range(_sync_rates(record)), _range(_host_rates(record)))
        if rates.flops_per_s is None and rates.sync_bytes_per_s is None:
            raise InvalidInputError(
                f"{file} has measured no training step and no weight sync; "
                "make one with: rlcore bench run train weight_sync --output FILE"
            )
        return rates

    def timed(self, plan: StepPlan, weight_bytes: int) -> StepPlan:
        """Return the plan with the seconds of one micro-batch of each phase, and of what it moves."""
        found = {
            "score": _over(plan.score_flops, self.flops_per_s),
            "train": _over(plan.flops, self.flops_per_s),
            "sync": _over(weight_bytes, self.sync_bytes_per_s),
        }
        phases = tuple(replace(phase, seconds=found.get(phase.name)) for phase in plan.phases)
        return replace(plan, phases=phases, move_seconds=_over(plan.moved_bytes, self.host_bytes_per_s))


def _over(amount: float, rate: Range | None) -> Range | None:
    return None if rate is None else (amount / rate[1], amount / rate[0])


def _range(values: Iterator[float]) -> Range | None:
    kept = list(values)
    return (min(kept), max(kept)) if kept else None


def _step_rates(record: Record, device: Hardware) -> Iterator[float]:
    """Yield the rates of all steps of train engines on one device whose model is known."""
    for case in record.cases:
        shape = _SHAPES.get(str(case.params.get("model")))
        recompute = _RECOMPUTE.get(str(case.params.get("recompute")))
        is_step = case.name.startswith("train/") and case.implementation == "engine" and case.params.get("devices") == 1
        if shape is None or recompute is None or not is_step or case.status != "pass":
            continue
        tokens = int(case.params["tokens"])
        traces = Traces(planned_model(shape.config()), device, tokens // 8, 0, {"compute_dtype": "bfloat16"})
        flops = traces.trace(recompute, tokens).train.flops
        yield from (flops / seconds for seconds in case.samples("time"))


def _sync_rates(record: Record) -> Iterator[float]:
    for case in record.cases:
        if case.name.startswith("weight_sync/") and case.implementation == "turn" and case.has("sync"):
            yield from (float(case.params["bytes"]) / seconds for seconds in case.samples("sync"))


def _host_rates(record: Record) -> Iterator[float]:
    limits = record.calibration.limits if record.calibration is not None else {}
    yield from (limits[name] for name in ("to_host/pinned", "to_device/pinned") if name in limits)
