"""``ModelHost``: the train engine and the inference engine of one base model, behind the clients.

One thread does what the clients ask, in the order in which they ask; samples are made meanwhile by the inference
engine's own thread. A snapshot is a copy of the adapters. The inference engine serves one at a time: who samples from
another has it sent first, when the samples under way have ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

import rlcore
from rlcore.compat.tinker.futures import APIFuture
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import RlcoreError, RolloutError, StateError, first_line
from rlcore.rollout.engine_driver import Request
from rlcore.rollout.fleet import Fleet
from rlcore.rollout.timeline import Timeline

T = TypeVar("T")
Snapshot = dict[str, Tensor]
_log = logging.getLogger(__name__)


class ModelHost:
    """Builds both engines, and owns them until ``close``.

    Args:
        trainer: arguments of ``TrainEngine.build``.
        sampler: arguments of ``InferenceEngine.build``, and ``executor``.
        unhealthy_after_s: an inference engine in another process that does not answer for so long is restarted.
    """

    def __init__(
        self,
        path: Path,
        module: Any,
        trainer: Mapping[str, Any],
        sampler: Mapping[str, Any],
        *,
        unhealthy_after_s: float,
    ) -> None:
        options = dict(sampler)
        self.vocab_size = check_model_folder(path).vocab_size
        with contextlib.ExitStack() as stack:
            self.train = stack.enter_context(rlcore.TrainEngine(module))
            self.train.build(**trainer)
            self.infer = stack.enter_context(rlcore.InferenceEngine(path, executor=options.pop("executor", "hf")))
            self.infer.build(**({} if "devices" in options else {"colocate_with": self.train}) | options)
            self._trained: Snapshot | None = None
            """The snapshot whose adapters the trainer has; None after a step."""
            self.base = self.snapshot()
            """New adapters change nothing."""
            self._fleet = Fleet(
                [self.infer],
                Timeline(),
                unhealthy_after_s=unhealthy_after_s,
                max_in_flight=None,
                on_change=self._recover,
            )
            self._stack = stack.pop_all()
        self._ops = ThreadPoolExecutor(1, thread_name_prefix="rlcore-tinker")
        self._changed = threading.Condition()
        self._under_way: dict[Future[RequestOutput], Request] = {}
        """The samples that the inference engine has not answered yet, and what it was asked for each."""
        self._is_in_doubt = False
        """The inference engine was restarted, and has answered nothing since."""
        self._is_closed = False
        """No sample begins any more."""
        self._served: Snapshot | None = None

    def submit(self, function: Callable[..., T], *args: Any) -> APIFuture[T]:
        """Call a function after all that was asked for before."""
        try:
            return APIFuture(self._ops.submit(function, *args))
        except RuntimeError as error:
            raise StateError("the ServiceClient is closed; make another") from error

    def close(self) -> None:
        """Close the engines. What they have not answered fails with StateError."""
        with self._changed:
            self._is_closed = True
        # First, or another snapshot's sample would wait for their ends.
        self._fail_under_way(StateError("the ServiceClient was closed before this sample had ended"))
        self._ops.shutdown(cancel_futures=True)
        self._fleet.close()
        self._stack.close()

    # ------------------------------------------------------------------------------------ in the host's thread

    def snapshot(self) -> Snapshot:
        """Return the trainer's adapters of now."""
        if self._trained is None:
            self._trained = self.train.state_dict(adapters="only")
        return self._trained

    def note_change(self) -> None:
        """Note that the trainer's weights are no longer those of a snapshot."""
        self._trained = None

    @contextlib.contextmanager
    def trainer_at(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, the trainer has the adapters of a snapshot."""
        if snapshot is self._trained:
            yield
            return
        own = self.train.state_dict(adapters="only")
        self.train.load_state_dict(snapshot)
        try:
            yield
        finally:
            self.train.load_state_dict(own)

    def sample(
        self, snapshot: Snapshot, prompt: list[int], params: SamplingParams, answer: Future[RequestOutput]
    ) -> None:
        """Begin to sample from a snapshot; ``answer`` is given the completions."""
        if snapshot is not self._served:
            self._wait_for_samples()
        if snapshot is not self._served or self._fleet.why_none():
            self._serve(snapshot)

        def deliver(found: RequestOutput | RlcoreError) -> None:
            self._is_in_doubt = False
            with self._changed:
                if answer not in self._under_way:
                    return  # it has failed already, with the engine
                del self._under_way[answer]
                self._changed.notify_all()
            answer.set_exception(found) if isinstance(found, RlcoreError) else answer.set_result(found)

        with self._changed:  # an answer waits until it is noted what it answers
            if self._is_closed:
                raise StateError("the ServiceClient was closed before this sample began")
            self._under_way[answer] = self._fleet.submit(prompt, params, deliver)

    def _wait_for_samples(self) -> None:
        """Wait until the samples under way have ended. An engine that fails meanwhile is restarted here for them."""
        while self._under_way:
            with self._changed:
                self._changed.wait_for(lambda: not self._under_way or self._fleet.why_none())
            self._serve_again()

    def _serve(self, snapshot: Snapshot) -> None:
        self._served = None  # after an error it has neither
        with self.trainer_at(snapshot):
            self._fleet.update(self.train.sync_weights)
        self._served = snapshot

    def _recover(self) -> None:
        """Have the inference engine restarted, which has failed; what it had under way begins anew."""
        with self._changed:
            self._changed.notify_all()
        with contextlib.suppress(RuntimeError):  # closed
            self._ops.submit(self._serve_again)

    def _serve_again(self) -> None:
        """Restart the inference engine if it has failed; if it cannot be, or fails again, what is under way fails."""
        if not (failure := self._fleet.why_none()):
            return
        if self._is_in_doubt:  # such as with weights that are NaN
            self._is_in_doubt = False
            self._fail_under_way(_given_up(failure))
            return
        self._is_in_doubt = True
        try:
            self._serve(self._served or self.base)
        except RlcoreError as error:
            self._is_in_doubt = False
            _log.error("the inference engine could not be restarted: %s", error)
            self._fail_under_way(error)

    def _fail_under_way(self, error: RlcoreError) -> None:
        with self._changed:
            lost, self._under_way = self._under_way, {}
            self._changed.notify_all()
        for answer, request in lost.items():
            self._fleet.cancel(request)  # or the next restart would begin it anew
            answer.set_exception(error)


def _given_up(failure: RolloutError) -> RolloutError:
    """Return the error of samples with which an engine failed, was restarted, and failed again."""
    why = first_line(failure.__cause__ or failure)
    error = RolloutError(
        f"the sampler failed, was restarted and failed again with this sample under way: {why}; the next sample() "
        "restarts it: leave out the prompt that it fails on, or sample from weights saved earlier if these are NaN"
    )
    error.__cause__ = failure
    return error
