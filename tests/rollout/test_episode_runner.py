"""The runner's calls take effect in their order, whichever thread they come from."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.sampling.params import SamplingParams
from rlcore.rollout import RolloutClient, Trajectory, Workflow
from rlcore.rollout.episode import EpisodeEnd
from rlcore.rollout.episode_runner import EpisodeRunner


class Rejects(Workflow):
    """Ends at once, without a request."""

    async def run_episode(self, client: RolloutClient, data: Any) -> None:
        return None


def runner_of(on_end: Callable[[EpisodeEnd], None]) -> EpisodeRunner:
    return EpisodeRunner(
        SimpleNamespace(check=lambda: None),  # type: ignore[arg-type]
        defaults=SamplingParams(),
        reader=lambda: None,  # type: ignore[arg-type,return-value]
        episode_timeout_s=60,
        on_end=on_end,
    )


def test_an_episode_that_is_cancelled_while_it_ends_and_then_started_again_runs_again() -> None:
    """So does one that a weight update makes too stale in the moment of its end: it must not be lost."""
    ends: queue.Queue[EpisodeEnd] = queue.Queue()
    may_go_on = threading.Event()

    def on_end(end: EpisodeEnd) -> None:
        ends.put(end)
        if end.episode.data == "first":
            assert may_go_on.wait(60)
            runner.start(7, "again", Rejects(), None)

    runner = runner_of(on_end)
    runner.start(7, "first", Rejects(), None)
    assert ends.get(timeout=60).episode.data == "first"
    runner.cancel([7])
    may_go_on.set()
    again = ends.get(timeout=60)
    assert (again.episode.number, again.episode.data, again.outcome) == (7, "again", "rejected")
    runner.close(60)
    runner.start(8, "late", Rejects(), None)
    assert runner.num_running == 0 and ends.empty()


class Tidies(Workflow):
    """Waits for ever. Once it is cancelled it tidies up, which fails or has a result, as the item says."""

    async def run_episode(self, client: RolloutClient, data: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            if data == "fails":
                raise ConnectionError("planted") from None
            return Trajectory([1], [True], [-1.0], [0]) if data == "has a result" else None


@pytest.mark.parametrize("item", ["fails", "has a result", "has none"])
def test_an_episode_that_was_cancelled_ends_so_whatever_its_workflow_does_then(
    item: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its number may belong to another one by then."""
    ends: queue.Queue[EpisodeEnd] = queue.Queue()
    runner = runner_of(ends.put)
    runner.start(7, item, Tidies(), None)
    runner.call_soon(lambda: asyncio.get_running_loop().call_later(0.01, runner.cancel, [7]))  # once it has begun
    runner.call_soon(lambda: asyncio.get_running_loop().call_later(0.01, runner.start, 7, "again", Rejects(), None))
    again, cancelled = (ends.get(timeout=60) for _ in range(2))
    assert (again.episode.data, again.outcome) == ("again", "rejected")
    assert (cancelled.episode.data, cancelled.outcome, cancelled.error) == (item, "cancelled", None)
    assert not cancelled.episode.trajectories and not caplog.messages
    runner.close(60)


def test_ctrl_c_in_a_call_does_not_stop_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come after the runner has noted that the loop is woken, and before it is."""
    ends: queue.Queue[EpisodeEnd] = queue.Queue()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    runner = runner_of(ends.put)
    with monkeypatch.context() as patch:
        patch.setattr(runner._loop, "call_soon_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.start(1, "one", Rejects(), None)
    runner.start(2, "two", Rejects(), None)
    assert [ends.get(timeout=5).episode.data for _ in range(2)] == ["one", "two"]
    runner.close(60)


def test_an_episode_whose_loop_is_closed_ends_without_a_word() -> None:
    """A cancelled one may tidy up for longer than the runner lives. Nobody asks about it any more."""
    ends: queue.Queue[EpisodeEnd] = queue.Queue()
    began, tidies = threading.Event(), threading.Event()
    given_up: list[bool] = []

    class TidiesUp(Workflow):
        async def run_episode(self, client: RolloutClient, data: Any) -> None:
            try:
                began.set()
                await asyncio.Event().wait()
            finally:
                try:
                    tidies.set()
                    await asyncio.Event().wait()
                except GeneratorExit:
                    given_up.append(True)
                    raise

    runner = runner_of(ends.put)
    runner.start(1, "one", TidiesUp(), None)
    assert began.wait(60)
    runner.cancel([1])
    assert tidies.wait(60)
    runner.close(60)
    gc.collect()
    assert given_up and ends.empty()


def test_after_close_no_call_is_kept() -> None:
    runner = runner_of(lambda end: None)
    runner.close(60)
    for number in range(3):
        runner.start(number, "late", Rejects(), None)
        assert not runner._calls
