"""``Episode``: a finished one, and ``EpisodeEnd``: how it came to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.errors import one_line
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
    oldest_version: int | None = field(init=False)
    """The oldest version of a token that was sampled for it; None if there is none. It is asked for several times, and
    computed once."""

    def __post_init__(self) -> None:
        found = [version for one in self.trajectories if (version := one.oldest_version) is not None]
        object.__setattr__(self, "oldest_version", min(found, default=None))

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
    error: BaseException | None = None
    """The reason why it has failed or timed out."""

    @property
    def is_good(self) -> bool:
        return self.outcome == "ended"


def in_words(error: BaseException | None) -> str:
    """Return why episodes have not ended well, of which this is the last error."""
    return "they were rejected" if error is None else one_line(error)
