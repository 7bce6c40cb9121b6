"""The files of a trace: what is read of processes that were killed, of other hosts, and of damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.errors import InvalidInputError
from rlcore.trace.events import merged, read_trace
from tests.trace.made_trace import TRAINER, MadeProcess, MadeProgram, moved, worker_facts


def test_spans_lie_in_each_other_thread_by_thread(tmp_path: Path) -> None:
    made = MadeProcess(tmp_path)
    made.begin("outer", 1)
    made.begin("other thread", 2, thread=8)
    made.span("inner", 3, 4)
    made.end(5, note="fact at the end")
    made.end(6, thread=8)
    trace = read_trace(tmp_path)
    assert [(span.name, span.depth, span.seconds) for span in trace.spans] == [
        ("outer", 0, 0.004),
        ("other thread", 0, 0.004),
        ("inner", 1, 0.001),
    ]
    assert trace.spans[0].facts == {"note": "fact at the end"}


def test_a_killed_process_leaves_what_it_did_and_what_it_was_doing(tmp_path: Path) -> None:
    made = MadeProcess(tmp_path)
    made.begin("train_step", 10, "worker", **worker_facts(TRAINER, "cpu:0"))
    made.span("inside", 11, 25)
    with made.path.open("a") as file:
        file.write('{"begin":"cut off amid this li')
    trace = read_trace(tmp_path)
    assert [(span.name, span.is_unfinished, span.end_ns) for span in trace.spans] == [
        ("train_step", True, 25_000_000),
        ("inside", False, 25_000_000),
    ]
    assert trace.notes == []


def test_damaged_lines_are_counted_and_the_others_read(tmp_path: Path) -> None:
    made = MadeProcess(tmp_path)
    made.span("first", 1, 2)
    with made.path.open("a") as file:
        file.write('no JSON\n{"begin": 3}\n{"end": 9, "thread": 55}\n' + "[" * 100_000 + "\n")
        file.write('{"event": "engine", "facts": {"number": "x"}}\n{"event": "clock", "facts": {"boot": "b"}}\n')
    made.span("last", 3, 4)
    trace = read_trace(tmp_path)
    assert [span.name for span in trace.spans] == ["first", "last"]
    assert trace.notes == [f"{made.path.name}: 6 damaged lines were left out"]


def test_processes_of_one_kernel_share_a_clock_and_those_of_others_are_shifted(tmp_path: Path) -> None:
    program = MadeProcess(tmp_path, 1)
    program.engine(TRAINER, "train", ["cuda:0"])
    program.write(event="clock", at=0, facts={"boot": "boot-b", "ahead_ns": 500_000_000, "error_ns": 1000})
    program.span("step", 100, 200)
    MadeProcess(tmp_path, 2, utc_ms=-90).span("same host", 110, 120)
    MadeProcess(tmp_path, 3, host="host-b", boot="boot-b").span("asked", 620, 630)
    MadeProcess(tmp_path, 4, host="host-c", boot="boot-c", utc_ms=40).span("not asked", 90, 100)
    trace = read_trace(tmp_path)
    assert trace.processes[0].pid == 1, "the program built the engines"
    assert {span.name: span.begin_ns / 1e6 for span in trace.spans} == {
        "step": 100,
        "same host": 110,
        "asked": 120,
        "not asked": 130,
    }
    assert len(trace.notes) == 1 and "clock of host-c was not compared" in trace.notes[0]


def test_a_worker_knows_the_facts_of_the_call_it_belongs_to(tmp_path: Path) -> None:
    made = MadeProgram(tmp_path, way_ms=1)
    made.call("onload", TRAINER, "cuda:0", 0, 10, **moved("weights", 1, 0.01))
    made.call("onload", TRAINER, "cuda:0", 10, 30, **moved("optimizer", 2, 0.02))
    found = [span.facts.get("tag") for span in read_trace(tmp_path).spans if span.is_of_worker]
    assert found == ["weights", "optimizer"]


def test_a_call_inside_another_is_no_call_of_the_program(tmp_path: Path) -> None:
    made = MadeProcess(tmp_path)
    made.begin("sync_weights", 1, "call")
    made.span("sync_call", 2, 3, "call", engine="the train engine", number=1)
    made.end(4)
    made.span("generate", 5, 6, "call", engine="the inference engine", number=2)
    assert [span.name for span in read_trace(tmp_path).calls] == ["sync_weights", "generate"]


@pytest.mark.parametrize("content", ["", "no JSON\n", '{"schema": "another/1"}\n', None])
def test_a_folder_without_a_trace_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "spans-a-1-0.jsonl").write_text(content)
    with pytest.raises(InvalidInputError, match=f"{tmp_path} holds no trace.*give the folder that `rlcore trace`"):
        read_trace(tmp_path)


def test_the_union_of_intervals() -> None:
    assert merged([(5, 9), (1, 3), (2, 4), (9, 9), (20, 20), (7, 8)]) == [(1, 4), (5, 9)]
