"""``RolloutController``: episodes run beside the training, and finished ones are given to the trainer in batches.

Four kinds of threads: the user's, which calls the controller; one with an event loop, in which all workflows run
(``episode_runner.py``); one for each inference engine (``engine_driver.py``); and one that looks for engines that do
not answer (``fleet.py``). One lock, the controller's, protects what they share: the ``EpisodeQueue`` with its
``StalenessBound``, and who waits for which episode. The loop's thread takes it when an episode ends, so nobody who
holds it may wait for that thread, but in ``Condition.wait``, which gives it up. The dataloader, which may be slow, runs
without it (``item_supply.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rlcore.arguments import AT_LEAST_0, COUNT, FLAG, LIST, MAPPING, SECONDS, TEXT, WHOLE_FROM_0, Kind, optional, takes
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import ParamsLike
from rlcore.errors import InvalidInputError, RolloutError, RolloutTimeoutError, StateError
from rlcore.rollout.conversation import reader_of
from rlcore.rollout.direct_episodes import DirectEpisodes
from rlcore.rollout.episode import Episode, EpisodeEnd, in_words
from rlcore.rollout.episode_queue import EpisodeQueue
from rlcore.rollout.episode_runner import Accept, EpisodeRunner
from rlcore.rollout.fleet import Fleet
from rlcore.rollout.item_supply import ItemSupply
from rlcore.rollout.lending import LANE as LENT
from rlcore.rollout.lending import TRAIN_ENGINE, LentDevices
from rlcore.rollout.ownership import owned
from rlcore.rollout.pacing import Pacing
from rlcore.rollout.staleness import StalenessBound
from rlcore.rollout.stats import RolloutStats
from rlcore.rollout.timeline import Timeline
from rlcore.rollout.trajectory import collate_trajectories
from rlcore.rollout.waiting import Waiting
from rlcore.rollout.workflow import WORKFLOW, Workflow

if TYPE_CHECKING:
    from rlcore.engines.inference import InferenceEngine
    from rlcore.engines.train import TrainEngine
    from rlcore.types import SyncReport

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
_MANY_REJECTIONS = 64
"""In a row; the first warning. Each later one needs twice as many."""
TRAINER = "trainer"
"""The trainer's lane of the timeline."""


@dataclass(slots=True)
class _Wait:
    """A wait for so many episodes."""

    wanted: int
    timeout_s: float | None
    began: float
    is_given_up: bool = False
    has_begun: bool = False


class RolloutController:
    """Runs a workflow on items of data, on one inference engine or several.

    Args:
        infer: an ``InferenceEngine`` with its weights and cache on its device, or a list of them: each is a replica
            that fails alone. The controller owns them until ``close``.
        workflow: what an episode does.
        batch_size: episodes that the trainer takes for each version of the weights.
        max_staleness: the most versions that the oldest token of an episode may lag behind when it is trained on. 0 is
            synchronous.
        pacing: begin episodes only as early as it takes that the trainer does not wait, within ``max_staleness``. False
            begins as many as ``max_staleness`` allows, as AReaL does: the episodes of samplers that are faster than the
            trainer are then as stale as ``max_staleness`` lets them be.
        max_concurrent: the most episodes that run together; None leaves that to ``max_staleness``.
        max_in_flight: the most prompts that one engine has at a time; others wait for the first engine with room. None:
            each goes at once to the engine that has least to do.
        lent: lends the trainer's devices while the trainer waits; it needs ``max_in_flight``, as what waits is theirs.
        accept: ``accept(trajectories) -> bool``; False rejects an episode, such as a group of equal rewards.
        sampling_params: defaults for the client.
        tokenizer: for ``client.chat``; None is that of the first engine's model folder.
        chat_template: a Jinja template; None is the tokenizer's own.
        template_options: passed to the template.
        episode_timeout_s: an episode that takes longer is dropped, and counted.
        max_failures_in_row: after so many episodes have failed in a row none begins, and ``wait`` raises; the next one
            tries again. Those of ``rollout_batch`` and ``evaluate`` do not count.
        unhealthy_after_s: an engine in another process that does not answer for so long is taken out.
    """

    @takes(
        "RolloutController",
        workflow=WORKFLOW,
        batch_size=COUNT,
        max_staleness=WHOLE_FROM_0,
        pacing=FLAG,
        max_concurrent=optional(COUNT),
        tokenizer=optional(Kind("a tokenizer of transformers", lambda value: hasattr(value, "apply_chat_template"))),
        accept=optional(Kind("a function", callable)),
        chat_template=optional(TEXT),
        template_options=optional(MAPPING),
        episode_timeout_s=SECONDS,
        max_in_flight=optional(COUNT),
        lent=optional(Kind("a LentDevices", lambda value: isinstance(value, LentDevices))),
        max_failures_in_row=COUNT,
        unhealthy_after_s=SECONDS,
    )
    def __init__(
        self,
        infer: InferenceEngine | list[InferenceEngine] | tuple[InferenceEngine, ...],
        workflow: Workflow,
        *,
        batch_size: int,
        max_staleness: int = 1,
        pacing: bool = True,
        max_concurrent: int | None = None,
        max_in_flight: int | None = None,
        lent: LentDevices | None = None,
        accept: Accept | None = None,
        sampling_params: ParamsLike = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        episode_timeout_s: float = 3600.0,
        max_failures_in_row: int = 32,
        unhealthy_after_s: float = 60.0,
    ) -> None:
        engines, defaults = _engines(infer), SamplingParams.of(sampling_params)
        if lent is not None and max_in_flight is None:
            raise InvalidInputError(
                "RolloutController(lent=) needs max_in_flight=, the most prompts that one engine has at a time: only "
                "what waits for room goes to devices that are lent"
            )
        if lent is not None and any(lent.infer is one for one in engines):
            raise InvalidInputError(
                "RolloutController(lent=) lends to an engine of its own, and this one is among those of infer; build "
                "another with colocate_with=train"
            )
        self._bound = StalenessBound(max_staleness=max_staleness, batch_size=batch_size, max_concurrent=max_concurrent)
        self._bound.set_version(max(engine.version for engine in engines))
        self._pacing = Pacing(self._bound) if pacing else None
        self._workflow, self._accept = workflow, accept
        self._max_failures_in_row = max_failures_in_row
        self._warn_at_rejections = _MANY_REJECTIONS
        self._changed = threading.Condition(threading.RLock())
        self._episodes = EpisodeQueue(self._bound)
        self._supply = ItemSupply(self._episodes, self._changed)
        self._is_paused = self._is_closed = self._failures_told = False
        self._num_changing = 0
        """How many blocks are under way in which engines may get another version than the controller's."""
        self.timeline = Timeline()
        """When each sampler generated, and when the trainer trained, waited and synced."""
        self._lent = lent
        with contextlib.ExitStack() as begun:  # ends all of it where something cannot begin
            begun.enter_context(owned(engines if lent is None else [*engines, lent.infer]))
            begun.callback(self.timeline.end, TRAINER)
            self._fleet = Fleet(
                engines,
                self.timeline,
                unhealthy_after_s=unhealthy_after_s,
                max_in_flight=max_in_flight,
                on_change=self._wake,
            )
            begun.callback(self._fleet.close)
            if lent is not None:
                self._fleet.add_guest(lent.infer, LENT)
            self._runner = EpisodeRunner(
                self._fleet,
                defaults=defaults,
                reader=reader_of(tokenizer, engines[0], chat_template=chat_template, options=template_options),
                episode_timeout_s=episode_timeout_s,
                on_end=self._note_end,
            )
            begun.callback(self._runner.close, _CLOSE_S)
            self._waiting = Waiting(self._changed, self._fleet, lent, self._bound)
            self._direct = DirectEpisodes(self._changed, self._episodes, self._runner, self._waiting)
            self._begun = begun.pop_all()

    # ------------------------------------------------------------------------------------- asynchronous

    def submit(self, data: Any) -> int:
        """Queue an item for an episode, which begins when the staleness bound allows; return its number."""
        with self._changed:
            self._check_open("submit()")
            number = self._episodes.add(data)
        self._start_due()
        return number

    def wait(self, count: int | None = None, timeout_s: float | None = None) -> list[Episode]:
        """Wait until ``count`` episodes can be given to the trainer, and return them, oldest version first.

        Each is given once. None of them is too stale for the version of now. Ctrl-C, and any error, takes none.

        Args:
            count: None means ``batch_size``.

        Raises:
            RolloutTimeoutError: they were not there in time; nothing is lost, call it again.
            StateError: without ``timeout_s``, so many would never come; says what is missing.
            RolloutError: no engine is left, or ``max_failures_in_row`` episodes failed.
        """
        wait = self._begin_wait(count, timeout_s)
        with self._trainer_does("wait"):
            while True:
                self._wait_until_ready(wait)
                if episodes := self._take(wait.wanted):
                    return episodes

    async def wait_async(self, count: int | None = None, timeout_s: float | None = None) -> list[Episode]:
        """As ``wait``, for a program with an event loop of its own. A task that is cancelled in it takes none.

        It waits in a thread of the event loop's default executor.
        """
        wait = self._begin_wait(count, timeout_s)
        with self._trainer_does("wait"):
            while True:
                wait.has_begun = False
                waiting = asyncio.ensure_future(asyncio.to_thread(self._wait_until_ready, wait))
                try:
                    await asyncio.shield(waiting)
                except asyncio.CancelledError:  # Ctrl-C too: the loop waits for its threads before the program ends
                    wait.is_given_up = True
                    self._wake()
                    if not wait.has_begun:
                        waiting.cancel()  # the executor may be full for ever; a thread that begins now ends at once
                    await _ended(waiting)
                    raise
                if episodes := self._take(wait.wanted):  # here and not in the thread, which cannot be cancelled
                    return episodes

    def prepare_batch(self, dataloader: Iterable[Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Return a batch of ``batch_size`` episodes; items of ``dataloader`` are submitted as needed, over and over.

        Args:
            dataloader: gives items, or lists of them. The same object each time.
            timeout_s: as ``wait``.

        Returns:
            See ``collate_trajectories``.
        """
        return collate_trajectories([one.trajectories for one in self.prepare_episodes(dataloader, timeout_s)])

    def prepare_episodes(self, dataloader: Iterable[Any], timeout_s: float | None = None) -> list[Episode]:
        """Return the episodes that ``prepare_batch`` makes a batch of."""
        self._check_open("prepare_batch()")
        self._supply.use(dataloader)
        self._supply.fill()
        self._start_due()
        return self.wait(timeout_s=timeout_s)

    # -------------------------------------------------------------------------------------- synchronous

    @takes("rollout_batch()", items=LIST, timeout_s=optional(AT_LEAST_0))
    def rollout_batch(self, items: Sequence[Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Run an episode for each item now, wait for all, and return their batch, in the order of the items.

        The staleness bound does not count them. Rejected and failed episodes are left out.

        Raises:
            RolloutTimeoutError: they did not end in time, and are cancelled.
            RolloutError: none of them has ended well, or no engine is left.
        """
        return collate_trajectories([one.trajectories for one in self.rollout_episodes(items, timeout_s)])

    def rollout_episodes(self, items: Sequence[Any], timeout_s: float | None = None) -> list[Episode]:
        """Return the episodes that ``rollout_batch`` makes a batch of."""
        with self._trainer_does("wait"):
            episodes = self._run_now("rollout_batch()", items, timeout_s, self._workflow, self._accept)
        with self._changed:
            self._episodes.count_given(episodes)
        return episodes

    @takes("evaluate()", items=LIST, workflow=optional(WORKFLOW), timeout_s=optional(AT_LEAST_0))
    def evaluate(
        self, items: Sequence[Any], workflow: Workflow | None = None, timeout_s: float | None = None
    ) -> list[Episode]:
        """Run an episode for each item now, on which nothing is trained; return those that ended well, in order.

        ``accept`` is not asked.

        Args:
            workflow: None takes the controller's.
        """
        with self._trainer_does("evaluate"):
            return self._run_now("evaluate()", items, timeout_s, workflow or self._workflow, None)

    # --------------------------------------------------------------------------------- pause and weights

    def pause(self) -> None:
        """Begin no more episodes; those that run go on."""
        self._is_paused = True

    def resume(self) -> None:
        """Begin episodes again."""
        self._is_paused = False
        self._start_due()

    @contextlib.contextmanager
    def generation_paused(self) -> Iterator[list[InferenceEngine]]:
        """Inside, no engine makes tokens, and the healthy engines, which it yields, are yours.

        Sequences that are under way stay as they are, and go on afterwards. After a weight sync of your own call
        ``set_version`` inside.
        """
        self._check_open("generation_paused()")
        with self._waiting.trainer_at_home(), self._weights_may_change(), self._fleet.paused() as engines:
            yield engines

    @takes("update_weights()", train=TRAIN_ENGINE)
    def update_weights(self, train: TrainEngine, *, version: int | None = None, **options: Any) -> SyncReport:
        """Send the trainer's weights to all engines. Sequences that are under way go on with the new weights.

        Engines that were taken out are restarted and come back.

        Args:
            train: a ``TrainEngine``.
            version: of the weights; None is the version of now + 1. At the first sync and after ``load_state_dict``
                give ``version=controller.version``.
            options: of ``TrainEngine.sync_weights``.

        Returns:
            What ``train.sync_weights`` does.
        """
        self._check_open("update_weights()")
        wanted = self._bound.version + 1 if version is None else version
        if type(wanted) is not int or wanted < self._bound.version:
            raise InvalidInputError(
                f"update_weights() takes a version of at least {self._bound.version}, the version of now, "
                f"got {wanted!r}"
            )

        def sync(engines: list[InferenceEngine]) -> SyncReport:
            report = train.sync_weights(engines, version=wanted, **options)
            if self._lent is not None:
                self._lent.note_synced(train)
            self.set_version(wanted)
            return report

        try:
            with self._trainer_does("sync"), self._waiting.trainer_at_home(), self._weights_may_change():
                return self._fleet.update(sync)
        finally:
            self._start_due()

    def set_version(self, version: int) -> None:
        """Tell the controller that the engines serve this version. ``update_weights`` does so itself.

        Episodes that would be too stale from now on begin anew, and their tokens count as discarded.

        Raises:
            InvalidInputError: it is lower than the version of now, or not what the engines serve.
        """
        served = self._fleet.served_versions
        if served - {version}:
            raise InvalidInputError(
                f"set_version({version!r}) must be the version that the engines serve, {sorted(served)}: give "
                "sync_weights(version=...) the same"
            )
        with self._changed:
            before = self.version
            self._runner.cancel(self._episodes.set_version(version))
            if self._pacing is not None and self.version > before:
                self._pacing.note_version()
        self._start_due()

    @property
    def version(self) -> int:
        """The version of the weights that the engines serve."""
        return self._bound.version

    @property
    def num_healthy(self) -> int:
        """The number of inference engines that have not been taken out."""
        return self._fleet.num_healthy

    # ----------------------------------------------------------------------------------- state and stats

    @property
    def stats(self) -> RolloutStats:
        """The counts since the beginning; ``load_state_dict`` continues them."""
        with self._changed:
            return RolloutStats.of(
                self._episodes.counts,
                self._episodes.staleness,
                self.timeline,
                lanes=[self._fleet.lane(index) for index in range(len(self._fleet.engines))],
                trainer=TRAINER,
                engine_failures=self._fleet.num_failures,
                requests_moved=self._fleet.num_moved,
                lent=LENT,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, for ``train.save(folder, {"rollout": controller.state_dict()})``.

        It has the episodes that have ended and were not given, the items of those that are queued or run, which begin
        anew after ``load_state_dict``, and the place in the dataloader. Ended ones with images or routed experts, which
        are no plain data, begin anew, too. Saved with the trainer's checkpoint, each item
        is trained on once, whichever side is killed when. Items must be plain data for that.
        """
        with self._supply.at_rest():
            state = self._episodes.snapshot()
        return state.plain()  # the tokens are copied without the lock: episodes begin and end meanwhile

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. Then call ``update_weights(train, version=controller.version)``.

        Until the engines serve that version no episode begins.

        Raises:
            StateError: episodes have been submitted already.
            InvalidInputError: it is no such state.
        """
        with self._supply.at_rest():
            self._check_open("load_state_dict()")
            self._episodes.load_state_dict(state)

    def close(self) -> None:
        """Cancel what runs, and end the threads; the engines are the caller's again. Closing twice does nothing.

        Raises:
            RolloutTimeoutError: a workflow does not let itself be cancelled; the engines are the caller's all the same.
        """
        with self._changed:
            self._is_closed = True
            self._episodes.queued.clear()
            self._changed.notify_all()
        self._begun.close()  # all of it, last begun first, whatever one of them raises

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------ in the user's threads

    def _check_open(self, purpose: str) -> None:
        if self._is_closed:
            raise StateError(f"{purpose} is refused: the RolloutController is closed; make another")

    @contextlib.contextmanager
    def _trainer_does(self, what: str) -> Iterator[None]:
        """Note in the timeline what keeps the trainer from training inside."""
        self.timeline.begin(TRAINER, what)
        try:
            yield
        finally:
            self.timeline.begin(TRAINER, "train")

    @takes("wait()", count=optional(COUNT), timeout_s=optional(AT_LEAST_0))
    def _begin_wait(self, count: int | None, timeout_s: float | None) -> _Wait:
        wanted = self._bound.batch_size if count is None else count
        with self._changed:
            if self._failures_told:
                self._failures_told, self._episodes.failures_in_row = False, 0
            if self._pacing is not None:
                self._pacing.note_wait(wanted)
        return _Wait(wanted, timeout_s, time.monotonic())

    def _wait_until_ready(self, wait: _Wait) -> None:
        """Return when as many episodes as are wanted can be given, or they are not waited for any more."""
        wait.has_begun = True
        wanted, timeout_s = wait.wanted, wait.timeout_s

        def is_ready() -> bool:
            if wait.is_given_up:
                return True
            if not self._serve_this_version("wait()"):
                return False
            if self._bound.choose(wanted):
                return True
            self._check_progress(wanted, has_deadline=timeout_s is not None)
            return False

        left_s = None if timeout_s is None else wait.began + timeout_s - time.monotonic()
        if not self._waiting.until(is_ready, left_s, self._supply):
            raise RolloutTimeoutError(
                f"wait({wanted}) has {len(self._bound.ready)} episodes after {timeout_s:g} s, and "
                f"{len(self._bound.running)} run{self._failures()}; call it again, or give a longer timeout_s"
            )

    def _take(self, wanted: int) -> list[Episode]:
        """Return so many episodes, and forget them; none if another thread was given them meanwhile."""
        with self._changed:
            self._start_due()  # they begin when the lock is given up; Ctrl-C in this call has taken nothing yet
            return self._episodes.give(self._bound.choose(wanted))

    def _check_progress(self, wanted: int, *, has_deadline: bool) -> None:
        """Raise when what ``wait`` waits for cannot come."""
        self._check_open("wait()")
        if (num_failures := self._episodes.failures_in_row) >= self._max_failures_in_row:
            self._failures_told = True  # until the next wait, which tries again, none begins
            last = self._episodes.last_failure
            raise RolloutError(
                f"{num_failures} episodes have failed in a row, the last one with {in_words(last)}"
            ) from last
        if error := self._fleet.why_none():
            raise error
        if self._pacing is not None:
            self._pacing.allow(wanted - len(self._bound.ready) - len(self._bound.running) - self._bound.room)
        if self._supply.num_short > 0:
            return  # episodes were rejected: others come
        if self._episodes.queued:
            self._start_due()
        begin = 0 if self._is_paused else min(len(self._episodes.queued), self._bound.room)
        coming = len(self._bound.ready) + len(self._bound.running) + begin
        if coming < wanted and not has_deadline:
            raise StateError(f"wait({wanted}) would wait for ever: {self._why_short(coming)}")

    def _why_short(self, coming: int) -> str:
        if self._is_paused:
            return f"{coming} episodes have ended or run, and the controller is paused; call resume()"
        if len(self._episodes.queued) > self._bound.room:
            return (
                f"{coming} episodes have ended or may run with version {self.version}, and the staleness bound of "
                f"{self._bound.max_staleness} lets no more begin; call update_weights(), or make batch_size "
                f"({self._bound.batch_size}) the number of episodes that each version is trained on"
            )
        return f"only {coming} episodes were submitted and not given yet{self._failures()}; submit() more"

    def _failures(self) -> str:
        if not (in_row := self._episodes.failures_in_row):
            return ""
        return f" ({in_row} have failed in a row, the last one with {in_words(self._episodes.last_failure)})"

    def _run_now(
        self, what: str, items: Sequence[Any], timeout_s: float | None, workflow: Workflow, accept: Accept | None
    ) -> list[Episode]:
        with self._changed:
            self._check_open(what)
            if self._is_paused:
                raise StateError(f"{what} is refused while the controller is paused; call resume()")
            if not items:
                raise InvalidInputError(f"{what} needs at least one item, got none")

        def check() -> None:
            self._check_open(what)  # its episodes are cancelled by close(), without a result
            self._serve_this_version(what)  # if not yet, the engines stand still until they do
            if error := self._fleet.why_none():
                raise error

        return self._direct.run(items, workflow, accept, timeout_s=timeout_s, check=check)

    @contextlib.contextmanager
    def _weights_may_change(self) -> Iterator[None]:
        """Inside, engines may get another version than the controller's: who waits in another thread waits for it."""
        with self._changed:
            self._num_changing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_changing -= 1
                self._changed.notify_all()

    def _serve_this_version(self, purpose: str) -> bool:
        """Return True if the engines serve the controller's version, False while another thread changes theirs.

        It is called with the lock held.

        Raises:
            StateError: they serve another one, and nobody changes that.
        """
        served = self._fleet.served_versions
        if not served - {self.version}:
            return True
        if self._num_changing:
            return False
        raise StateError(
            f"{purpose} is refused: the engines serve version {min(served)} and the controller is at "
            f"{self.version}; call update_weights(train, version=controller.version)"
        )

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _start_due(self) -> None:
        self._runner.call_soon(self._start_queued)

    # --------------------------------------------------------------------------------- in the loop's thread

    def _start_queued(self) -> None:
        """Begin what is due. It runs in the loop's thread alone, so that Ctrl-C can never lose an item in between."""
        with self._changed:
            served = min(self._fleet.served_versions, default=self.version)
            if self._is_paused or self._is_closed or self.version != served:
                return
            episodes = self._episodes
            while episodes.queued and self._bound.capacity and episodes.failures_in_row < self._max_failures_in_row:
                number, data = episodes.begin()
                self._runner.start(number, data, self._workflow, self._accept)

    def _note_end(self, end: EpisodeEnd) -> None:
        with self._changed:
            is_direct = self._direct.has(end.episode.number)
            self._episodes.end(end, is_direct=is_direct)
            if end.outcome == "cancelled":
                return
            self._warn_of_rejections(self._episodes.rejections_in_row)
            if is_direct:
                self._direct.note_end(end)
            self._changed.notify_all()
        self._start_queued()

    def _warn_of_rejections(self, in_row: int) -> None:
        """Say it after 64, 128, 256, ..., each once: who rejects all waits for ever, who rejects most waits long."""
        if in_row < self._warn_at_rejections:
            return
        self._warn_at_rejections *= 2
        rejected, ended = (self._episodes.counts[name] for name in ("rejected", "ended"))
        _log.warning(
            "%d episodes in a row were rejected, by the workflow or by accept (%.0f %% of all that ended well); others "
            "take their place, and the trainer waits. If accept wants groups of different rewards, the task is nearly "
            "solved or far too hard: stop, or give other items",
            in_row,
            100 * rejected / (rejected + ended),
        )


async def _ended(waiting: asyncio.Future[None]) -> None:
    """Wait until a thread has ended, which has given the trainer's devices back then; another cancellation waits."""
    while not waiting.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([waiting])
    _ = waiting.cancelled() or waiting.exception()  # or asyncio would log that nobody has asked for it


def _engines(infer: InferenceEngine | list[InferenceEngine] | tuple[InferenceEngine, ...]) -> list[InferenceEngine]:
    engines = list(infer) if isinstance(infer, list | tuple) else [infer]
    lacking = [one for one in engines if not all(hasattr(one, name) for name in ("submit", "collect", "version"))]
    if not engines or lacking or len({id(one) for one in engines}) < len(engines):
        raise InvalidInputError(
            f"RolloutController takes an InferenceEngine or several different ones, got {infer!r:.200}"
        )
    if not all(getattr(one, "is_built", True) for one in engines):
        raise StateError("RolloutController takes inference engines that are built; call build() first")
    return engines
