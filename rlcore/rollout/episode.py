"""``Episode``: a finished one, and ``EpisodeEnd``: how it came to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlcore.rollout.trajectory import Trajectory

Outcome = Literal["ended", "rejected", "failed", "timed_out", "cancelled"]
"""Only "ended" is a good end."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode."""

    number: int
    """The one that ``submit`` gave."""
    data: Any
    trajectories: list[Trajectory]

    @property
    def oldest_version(self) -> int | None:
        """The oldest version of a token that was sampled for it; None if there is none."""
        found = [one.oldest_version for one in self.trajectories]
        return min((version for version in found if version is not None), default=None)

    @property
    def num_sampled(self) -> int:
        return sum(one.num_sampled for one in self.trajectories)


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """How an episode ended."""

    episode: Episode
    outcome: Outcome
    num_sampled: int
    """The number of tokens that were sampled for it, whatever became of them."""
    error: Exception | None = None
    """The reason why it has failed or timed out."""

    @property
    def is_good(self) -> bool:
        return self.outcome == "ended"
