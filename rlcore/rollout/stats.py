"""``RolloutStats``: what became of the episodes and of the sampled tokens, and who waited for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.rollout.timeline import Timeline

_MEASURED = {
    "staleness",
    "sampler_idle",
    "trainer_idle",
    "sync",
    "lent",
    "hidden",
    "engine_failures",
    "requests_moved",
}


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Counts since the beginning, and shares of the timeline's time. ``str()`` of it is a report of a few lines."""

    begun: int
    """Episodes that have begun; one that begins anew counts again."""
    ended: int
    """Episodes that ended well."""
    given: int
    """Episodes that the trainer was given, each once."""
    rejected: int
    """The workflow returned None, or ``accept`` said no."""
    failed: int
    """The workflow raised."""
    timed_out: int
    """They took longer than ``episode_timeout_s``, or a call in them, such as of a reward, did not end in time."""
    too_stale: int
    """They became too stale, and began anew."""
    tokens_sampled: int
    tokens_rejected: int
    """Sampled for episodes that were rejected, such as groups of equal rewards."""
    tokens_discarded: int
    """Sampled for episodes that failed, took too long, were cancelled or became too stale."""
    staleness: Mapping[int, int]
    """Versions that the oldest token lagged behind when its episode was given -> number of episodes."""
    sampler_idle: Sequence[float]
    """For each engine the share of the time in which it had nothing to do, or stood still for a sync."""
    trainer_idle: float
    """The share of the time in which the trainer waited for episodes."""
    sync: float
    """The share of the time in which weights were synced."""
    lent: float
    """The share of the time in which the trainer's devices were lent and generated."""
    hidden: float
    """The share of the samplers' time of generation in which the trainer trained: what asynchrony wins. Unlike the
    other shares it is of the timeline's latest 10,000 spans alone, and of those that have not ended."""
    engine_failures: int
    """How often an engine was taken out."""
    requests_moved: int
    """Requests that were begun anew because their engine was taken out."""

    @classmethod
    def of(
        cls,
        counts: Mapping[str, int],
        staleness: Mapping[int, int],
        timeline: Timeline,
        *,
        lanes: Sequence[str],
        trainer: str,
        engine_failures: int,
        requests_moved: int,
        lent: str,
    ) -> RolloutStats:
        total_s = max(timeline.total_s, 1e-9)
        counted = set(cls.__slots__) - _MEASURED
        return cls(
            **{name: counts.get(name, 0) for name in counted},
            staleness=dict(sorted(staleness.items())),
            sampler_idle=[1 - timeline.seconds(lane, "generate") / total_s for lane in lanes],
            trainer_idle=timeline.seconds(trainer, "wait") / total_s,
            sync=timeline.seconds(trainer, "sync") / total_s,
            lent=timeline.seconds(lent, "generate") / total_s,
            hidden=_hidden(timeline, lanes, trainer),
            engine_failures=engine_failures,
            requests_moved=requests_moved,
        )

    def __str__(self) -> str:
        histogram = ", ".join(f"{lag}: {count}" for lag, count in self.staleness.items()) or "none"
        idle = ", ".join(f"{share:.0%}" for share in self.sampler_idle)
        return (
            f"episodes: {self.given} given, {self.rejected} rejected, {self.failed} failed, "
            f"{self.timed_out} timed out, {self.too_stale} too stale\n"
            f"tokens: {self.tokens_sampled} sampled, {self.tokens_rejected} rejected, "
            f"{self.tokens_discarded} discarded\n"
            f"staleness -> episodes: {histogram}\n"
            f"idle: samplers {idle}; trainer {self.trainer_idle:.0%}; syncing {self.sync:.0%}; "
            f"generation hidden {self.hidden:.0%}" + (f"; lent to samplers {self.lent:.0%}" if self.lent else "")
        )


def _hidden(timeline: Timeline, lanes: Sequence[str], trainer: str) -> float:
    hidden_s = sum(timeline.seconds_together(lane, "generate", trainer, "train") for lane in lanes)
    all_s = sum(timeline.seconds_together(lane, "generate", lane, "generate") for lane in lanes)
    return hidden_s / max(all_s, 1e-9)
