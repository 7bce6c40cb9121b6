"""How much of what the machine can do a result reaches."""

from __future__ import annotations

import statistics
import tomllib
from dataclasses import dataclass
from pathlib import Path

from rlcore.bench.result import Calibration, CaseResult, System

_PEAKS = Path(__file__).with_name("peaks.toml")


@dataclass(frozen=True, slots=True)
class Share:
    """Of the limit that takes the longest."""

    limit: str
    value: float
    """1: as fast as that limit was measured to be. More is possible: caches, reductions in the network."""


@dataclass(frozen=True, slots=True)
class Peak:
    value: float
    source: str
    retrieved: str


def share_of_limit(result: CaseResult, calibration: Calibration | None) -> Share | None:
    """None where the result states no need, or none of what it needs was measured here."""
    if result.status != "pass" or calibration is None:
        return None
    least_s = {
        name: amount / calibration.limits[name] for name, amount in result.limits.items() if name in calibration.limits
    }
    if not least_s:
        return None
    limit = max(least_s, key=least_s.__getitem__)
    return Share(limit, least_s[limit] / statistics.median(times(result)))


def times(result: CaseResult) -> list[float]:
    """Seconds of the device's own clock where there is one, else of the host's."""
    return result.samples("device_time" if result.has("device_time") else "time")


def peak(system: System, limit: str) -> Peak | None:
    """What the maker's datasheet says of a limit; None where no authority says anything."""
    for device in tomllib.loads(_PEAKS.read_text())["device"]:
        if device["name"] in system.accelerator_model_name and limit in device["peaks"]:
            return Peak(float(device["peaks"][limit]), device["source"], device["retrieved"])
    return None


def unit(limit: str) -> str:
    return "FLOP/s" if limit.startswith("product/") else "B/s"
