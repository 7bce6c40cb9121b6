"""The runner's calls take effect in their order, whichever thread they come from."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

from rlcore.engines.sampling.params import SamplingParams
from rlcore.rollout import RolloutClient, Workflow
from rlcore.rollout.episode import EpisodeEnd
from rlcore.rollout.episode_runner import EpisodeRunner


class Rejects(Workflow):
    """Ends at once, without a request."""

    async def run_episode(self, client: RolloutClient, data: Any) -> None:
        return None


def test_an_episode_that_is_cancelled_while_it_ends_and_then_started_again_runs_again() -> None:
    """So does one that a weight update makes too stale in the moment of its end: it must not be lost."""
    ends: queue.Queue[EpisodeEnd] = queue.Queue()
    may_go_on = threading.Event()

    def on_end(end: EpisodeEnd) -> None:
        ends.put(end)
        if end.episode.data == "first":
            assert may_go_on.wait(60)
            runner.start(7, "again", Rejects(), None)

    runner = EpisodeRunner(
        SimpleNamespace(check=lambda: None),  # type: ignore[arg-type]
        defaults=SamplingParams(),
        reader=lambda: None,  # type: ignore[arg-type,return-value]
        episode_timeout_s=60,
        on_end=on_end,
    )
    runner.start(7, "first", Rejects(), None)
    assert ends.get(timeout=60).episode.data == "first"
    runner.cancel([7])
    may_go_on.set()
    again = ends.get(timeout=60)
    assert (again.episode.number, again.episode.data, again.outcome) == (7, "again", "rejected")
    runner.close(60)
    runner.start(8, "late", Rejects(), None)
    assert runner.num_running == 0 and ends.empty()
