"""A trace has each call twice: of the engine, with the results, and of the worker's process, with its device.

This module is imported when a program is traced (``rlcore.spans``).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore import spans
from rlcore.engines.rank_batch import RankBatch
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.errors import StateError
from rlcore.types import OffloadReport

if TYPE_CHECKING:
    from rlcore.engines.launchers.group import WorkerGroup
    from rlcore.engines.launchers.worker import WorkerContext, WorkerHandle

_COMPUTES = {"generate", "train_step", "score", "evaluate"}
"""Methods that keep a device busy."""
_PROFILED = 3
"""The call of a method that the profiler records: earlier ones compile and allocate."""
_ROUNDS = 8
"""Questions for the clock of another host: the one that is answered fastest says most."""
_counts: Counter[tuple[int, str]] = Counter()
"""Calls so far by number of the engine and method."""


@contextlib.contextmanager
def worker_span(recorder: spans.Recorder, context: WorkerContext, method: str) -> Iterator[None]:
    """Note what a worker does inside; the profiler records the kernels of one call of each method, if wanted."""
    facts = {
        "engine": context.engine,
        "number": context.number,
        "rank": context.rank,
        "device": context.device_name,
        "devices": context.devices,
    }
    path = _profile_of(recorder, context, method)
    if path is None:
        with spans.OpenSpan(recorder, method, facts, "worker"):
            yield
        return
    # The inner span begins when the profiler records, so that the two clocks can be compared.
    recorded = spans.OpenSpan(recorder, method, facts | {"kernels": path.name}, "worker")
    with spans.OpenSpan(recorder, "recording", facts, "worker"), _recording(context, path), recorded:
        yield


@contextlib.contextmanager
def _recording(context: WorkerContext, path: Path) -> Iterator[None]:
    context.device.profiler.start(path)
    try:
        yield
    finally:
        with contextlib.suppress(StateError):  # the call has ended the recording
            context.device.profiler.stop()


def _profile_of(recorder: spans.Recorder, context: WorkerContext, method: str) -> Path | None:
    if not recorder.records_kernels or method not in _COMPUTES:
        return None
    _counts[context.number, method] += 1
    if _counts[context.number, method] != _PROFILED:
        return None
    return recorder.folder / f"kernels-{context.host}-{context.number}-{context.rank}-{method}.json.gz"


def results_of(calls: Sequence[tuple[Sequence[Any], dict[str, Any]]], results: Sequence[Any]) -> dict[str, Any]:
    """Return what a trace says about the results of one call to all workers."""
    arguments, first = calls[0][0], results[0]
    if isinstance(first, OffloadReport):
        return {"tag": arguments[0]} | _moved(results)
    if isinstance(first, list) and first and isinstance(first[0], OffloadReport):  # a swap, by its plan
        each = zip(arguments[0], zip(*results, strict=False), strict=False)
        return {"moves": [{"move": move, "tag": tag} | _moved(reports) for (_, move, tag), reports in each]}
    if arguments and isinstance(arguments[0], RankBatch):
        return {"tokens": arguments[0].num_tokens, "micro_batches": arguments[0].num_micro_batches}
    outputs = [output for found in results for output in _outputs(found)]
    if outputs:
        lengths = [len(one.token_ids) for output in outputs for one in output.outputs]
        return {"prompts": len(outputs), "tokens": sum(lengths), "longest": max(lengths, default=0)}
    return {}


def _moved(reports: Sequence[OffloadReport]) -> dict[str, Any]:
    return {
        "bytes": sum(report.moved_bytes for report in reports),
        "most_bytes": max(report.moved_bytes for report in reports),
        "seconds": max(report.seconds for report in reports),
        "pinned": all(report.pinned for report in reports),
        "first_use": any(report.first_use for report in reports),
    }


def _outputs(found: Any) -> list[RequestOutput]:
    values = list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else []
    return [one for one in values if isinstance(one, RequestOutput)]


# ------------------------------------------------------------------------------------------- when workers start


def note_workers(group: WorkerGroup) -> None:
    """Note how far the clocks of other hosts with workers of this group are from this one's."""
    asked = {socket.gethostname()}
    for worker in group.workers:
        if worker.context.host not in asked:
            asked.add(worker.context.host)
            spans.note("clock", **_clock_of(worker))


def _clock_of(worker: WorkerHandle) -> dict[str, Any]:
    """Ask a worker for its host's clock some times: it was read about midway between question and answer."""
    found: list[tuple[int, int, str]] = []
    for _ in range(_ROUNDS):
        asked = time.monotonic_ns()
        boot, theirs = worker.call("clock").result()
        answered = time.monotonic_ns()
        found.append((answered - asked, theirs - (asked + answered) // 2, boot))
    took, ahead, boot = min(found)
    return {"boot": boot, "ahead_ns": ahead, "error_ns": took // 2}
