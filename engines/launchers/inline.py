"""Runs a worker in the user's own process: no copies, breakpoints work."""

from __future__ import annotations

from typing import Any

from rlcore.engines.launchers.worker import WorkerContext, as_engine_error
from rlcore.nn import real_device


class InlineWorker:
    """A worker that lives here; a call returns when it is done."""

    def __init__(self, worker_class: Any, context: WorkerContext) -> None:
        self.context = context
        self.worker = worker_class(context)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker.

        Raises:
            RlcoreError: as raised, with a note naming the rank.
            WorkerError: for anything else; its ``__cause__`` is the original.
        """
        try:
            # The user may stand inside a meta context (`build` in the RLite tutorial does); workers never do.
            with real_device():
                return getattr(self.worker, method)(*args, **kwargs)
        except Exception as error:
            translated = as_engine_error(error, self.context, method)
            if translated is error:
                raise
            raise translated from error
