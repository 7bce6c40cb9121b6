"""Spans: what a process notes of itself, that it costs one look when nothing is recorded, and what ends a recording."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore import spans
from rlcore.errors import InvalidInputError


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[spans.Recorder]:
    """The recorder of this process, which records nothing afterwards."""
    monkeypatch.setattr(spans, "recorder", None)
    monkeypatch.setenv("RLCORE_TRACE", "")
    yield spans.start(tmp_path / "new" / "trace")
    monkeypatch.delenv("RLCORE_TRACE_KERNELS", raising=False)


def lines(recorder: spans.Recorder) -> list[dict[str, Any]]:
    (path,) = recorder.folder.glob("spans-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_nothing_is_made_while_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "recorder", None)
    assert spans.span("rewards", number=3) is spans.NO_SPAN is spans.call_span("generate")
    with spans.span("rewards") as here:
        here.add({"fact": 1})
    spans.note("engine", number=1)
    spans.note_lane("sampler 0", "generate", 0.0, 1.0)


def test_a_span_that_is_off_costs_little_more_than_a_with_statement(
    monkeypatch: pytest.MonkeyPatch, times_as_long: Callable[[Callable[[], Any], Callable[[], Any]], float]
) -> None:
    monkeypatch.setattr(spans, "recorder", None)

    def spanned() -> None:
        with spans.span("step"):
            pass

    def one_call() -> None:
        with no_span("step"):
            pass

    def no_span(name: str) -> Any:
        return spans.NO_SPAN

    assert times_as_long(spanned, one_call) < 2


def test_spans_are_written_as_they_begin_and_end(recorder: spans.Recorder) -> None:
    with spans.span("rewards", number=3) as here:
        assert lines(recorder)[-1]["begin"] == "rewards", "a process that is killed now has said so"
        here.add({"right": 5})
    head, thread, begin, end = lines(recorder)
    assert (head["schema"], head["pid"], head["boot"]) == (spans.SCHEMA, os.getpid(), spans.boot_id())
    assert thread == {"thread": threading.get_native_id(), "name": threading.current_thread().name}
    assert (begin["kind"], begin["facts"], end["facts"]) == ("program", {"number": 3}, {"right": 5})
    assert head["monotonic_ns"] <= begin["at"] <= end["end"]


def test_an_error_is_noted_and_goes_on(recorder: spans.Recorder) -> None:
    with pytest.raises(ZeroDivisionError), spans.span("rewards"):
        _ = 1 / 0
    assert lines(recorder)[-1]["facts"] == {"error": "ZeroDivisionError"}


def test_each_thread_has_its_name(recorder: spans.Recorder) -> None:
    def work() -> None:
        with spans.span("work"):
            pass

    thread = threading.Thread(target=work, name="helper")
    thread.start()
    thread.join()
    named, begin, end = lines(recorder)[1:]
    assert named["name"] == "helper" and named["thread"] == begin["thread"] == end["thread"] == thread.native_id


def test_what_json_does_not_have_is_written_as_text(recorder: spans.Recorder) -> None:
    with spans.span("save", folder=Path("/checkpoint")):
        pass
    assert lines(recorder)[2]["facts"] == {"folder": "/checkpoint"}


def test_workers_find_the_folder_and_a_second_start_changes_nothing(recorder: spans.Recorder, tmp_path: Path) -> None:
    assert os.environ["RLCORE_TRACE"] == str(tmp_path / "new" / "trace")
    assert spans.start(tmp_path / "another") is recorder
    assert not (tmp_path / "another").exists()


def test_a_full_disk_ends_the_trace_and_not_the_program(
    recorder: spans.Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._descriptor)
    os.close(full)
    with spans.span("rewards"):
        pass
    assert spans.recorder is None
    assert capsys.readouterr().err == f"rlcore: the trace in {recorder.folder} ends here: No space left on device\n"
    with spans.span("rewards"):
        pass


def test_a_fork_notes_nothing(recorder: spans.Recorder) -> None:
    before = lines(recorder)
    if (child := os.fork()) == 0:
        with spans.span("of the child"):
            os._exit(0 if spans.recorder is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert lines(recorder) == before


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match=r"a trace is a folder that can be written, got '.*/file': File exists"):
        spans.Recorder(tmp_path / "file")
