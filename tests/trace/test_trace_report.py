"""The report of a trace: its tables, a page that needs nothing else and runs nothing of what it shows, and the JSON."""

from __future__ import annotations

import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import InvalidInputError
from rlcore.rollout.timeline import Timeline
from rlcore.trace.report import make_report, text_of
from tests.trace.made_trace import TRAINER, MadeProgram, colocated, worker_facts

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \u2028 `${alert(3)}`"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def page_data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_tables_say_where_the_time_goes(tmp_path: Path) -> None:
    colocated(tmp_path)
    report = make_report(tmp_path)
    phases, idle, faster = report.tables
    assert phases.note == "a mean step of 1 s, over 3 steps; 2 are left out, which warm up or record kernels"
    assert ["generate", "1", "300 ms", "30.0%", ""] in phases.rows
    assert ["onload optimizer", "1", "200 ms", "20.0%", "10.4 GB"] in phases.rows
    assert phases.rows[-2:] == [
        ["outside the engines' calls", "", "100 ms", "10.0%", ""],
        ["of that: rewards", "1", "50 ms", "5.0%", ""],
    ]
    assert idle.rows[0][:4] == ["waits for onload of optimizer: 10.4 GB at 52 GB/s", "1", "200 ms", "20.0%"]
    assert idle.note.startswith("it computes in 55.0% of a step")
    assert "n/a: no limits are known" in faster.note
    text = text_of(report, tmp_path)
    assert "Why cuda:0 is idle" in text and "trace.html: open it in a browser" in text


def test_there_is_no_table_of_advice_where_no_engine_was_called(tmp_path: Path) -> None:
    MadeProgram(tmp_path).program.span("step", 0, 50).span("step", 50, 100)
    report = make_report(tmp_path)
    assert [table.title for table in report.tables] == ["Where a step's time goes"]


@pytest.mark.parametrize("name", ["trace.json", "trace.html"])
def test_a_report_replaces_its_own_files_and_no_others(tmp_path: Path, name: str) -> None:
    colocated(tmp_path)
    make_report(tmp_path)
    make_report(tmp_path)
    for foreign in ('{"traceEvents": []}', "<title>my trace</title>", ""):
        (tmp_path / name).write_text(foreign)
        with pytest.raises(
            InvalidInputError, match=rf"{name} was not written by rlcore trace, and its report would rep"
        ):
            make_report(tmp_path)
        assert (tmp_path / name).read_text() == foreign


def test_the_page_loads_nothing_and_shows_hostile_names_as_text(tmp_path: Path) -> None:
    made = colocated(tmp_path, steps=3)
    made.program.span(HOSTILE, 2300, 2340)
    made.program.begin(HOSTILE, 2990)  # never ends: it stands in a note, too
    make_report(tmp_path)
    page = (tmp_path / "trace.html").read_text()
    reader = _Reader()
    reader.feed(page)
    names = [tag for tag, _ in reader.tags]
    assert names.count("script") == 2 and "img" not in names and "link" not in names and "iframe" not in names
    attributes = [name for _, attrs in reader.tags for name in attrs]
    assert not [name for name in attributes if name in ("src", "href") or name.startswith("on")]
    assert "http://" not in page and "https://" not in page and "url(" not in page and "@import" not in page
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page, "in the tables"
    bars = [bar for row in page_data(page)["rows"] for bar in row["bars"]]
    assert [bar for bar in bars if bar[3] == HOSTILE], "the timeline has the name as it is"


def test_the_page_has_a_row_for_each_thread_device_and_lane(tmp_path: Path) -> None:
    made = colocated(tmp_path, steps=3)
    made.program.write(thread=7, name="MainThread")
    made.program.write(lane="sampler 0", name="generate", at=0, end=300_000_000)
    make_report(tmp_path)
    data = page_data((tmp_path / "trace.html").read_text())
    assert [row["name"] for row in data["rows"]] == [
        "program, MainThread",
        "program, MainThread (2)",
        "sampler 0",
        "cuda:0: calls",
        "cuda:0: idle, and why",
    ]
    (moves,) = [row["bars"] for row in data["rows"] if row["name"] == "cuda:0: calls"]
    assert [0.4, 0.6, "copy", "onload optimizer", "onload of optimizer: 10.4 GB at 52 GB/s, 200 ms"] in moves


def test_the_json_is_what_perfetto_reads(tmp_path: Path) -> None:
    colocated(tmp_path, steps=2)
    make_report(tmp_path)
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    timed = [one for one in events if one["ph"] == "X"]
    assert {"name", "ph", "ts", "dur", "pid", "tid"} <= set(timed[0])
    waits = [one for one in timed if one["name"] == "waits for onload of optimizer: 10.4 GB at 52 GB/s"]
    assert [(one["ts"], one["dur"]) for one in waits] == [(400_000.0, 200_000.0), (1_400_000.0, 200_000.0)]
    named = {one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert {"program 1 on host-a", "worker process 100 on host-a", "devices"} <= named


def write_kernels(path: Path, events: list[dict[str, Any]]) -> None:
    own = {"ph": "X", "cat": "user_annotation", "name": "train_step of the train engine", "ts": 5000.0, "dur": 8000.0}
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [own, *events]}).encode()))


def test_the_kernels_of_a_recorded_call_are_on_the_programs_clock(tmp_path: Path) -> None:
    made = MadeProgram(tmp_path)
    made.call("score", TRAINER, "cuda:0", 0, 1)
    facts = worker_facts(TRAINER, "cuda:0") | {"kernels": "kernels-a.json.gz"}
    made._workers["cuda:0"].span("train_step", 10, 20, "worker", **facts)
    write_kernels(
        tmp_path / "kernels-a.json.gz",
        [
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 6000.0, "dur": 2000.0, "tid": 7},
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 7000.0, "dur": 2000.0, "tid": 8},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 12000.0, "dur": 1000.0, "tid": 7},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 6000.0, "dur": 1.0, "tid": 1},
        ],
    )
    report = make_report(tmp_path)
    (call,) = report.kernels
    assert call.intervals[0] == (11_000_000, 13_000_000, "gemm")
    assert call.busy_share == pytest.approx(0.4), "two that overlap are busy once"
    assert [(one.name, one.count) for one in call.top] == [("gemm", 2), ("Memcpy HtoD", 1)]
    assert report.tables[-1].note.startswith("kernels had 40.0% of this call of 10 ms")


def test_operators_of_a_host_have_their_own_time(tmp_path: Path) -> None:
    made = MadeProgram(tmp_path)
    facts = worker_facts(TRAINER, "cpu:0") | {"kernels": "kernels-a.json.gz"}
    made.call("score", TRAINER, "cpu:0", 0, 1)
    made._workers["cpu:0"].span("train_step", 10, 20, "worker", **facts)
    nested = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "ts": 6000.0, "dur": 1000.0, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 6100.0, "dur": 700.0, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 8000.0, "dur": 500.0, "tid": 1},
    ]
    write_kernels(tmp_path / "kernels-a.json.gz", nested)
    (call,) = make_report(tmp_path).kernels
    assert {one.name: round(one.seconds * 1e6) for one in call.top} == {"aten::mm": 1200, "aten::linear": 300}


@pytest.mark.parametrize(
    "content",
    [None, b"", b"no gzip", gzip.compress(b"{}"), gzip.compress(b"[1")],
    ids=["no file", "empty", "no gzip", "no list", "cut"],
)
def test_kernels_that_cannot_be_read_are_a_note(tmp_path: Path, content: bytes | None) -> None:
    made = MadeProgram(tmp_path)
    made.call("score", TRAINER, "cuda:0", 0, 1)
    facts = worker_facts(TRAINER, "cuda:0") | {"kernels": "../kernels-a.json.gz"}
    made._workers["cuda:0"].span("train_step", 10, 20, "worker", **facts)
    if content is not None:
        (tmp_path / "kernels-a.json.gz").write_bytes(content)
    report = make_report(tmp_path)
    assert report.kernels == [] and "the kernels of a call of train_step, cannot be read" in report.notes[0]


def test_a_record_without_limits_is_refused(tmp_path: Path) -> None:
    colocated(tmp_path, steps=2)
    whole = json.loads((Path(__file__).parents[2] / "bench/results/full-cpu.json").read_text())
    (tmp_path / "mine.json").write_text(json.dumps(whole | {"calibration": None, "cases": []}))
    with pytest.raises(InvalidInputError, match=r"mine.json has no limits of its machine; give a record with"):
        make_report(tmp_path, tmp_path / "mine.json")


def rolled_out(folder: Path, *, waits_ms: float) -> Path:
    """Write a program whose trainer waits so long for each of three batches, and trains for 30 ms."""
    folder.mkdir()
    made, at = MadeProgram(folder).program, 500.0
    made.write(lane="trainer", name="train", at=0, end=round(at * 1e6))  # an evaluation before the first step
    for _ in range(3):
        for name, lasts in (("wait", waits_ms), ("train", 30.0), ("sync", 2.0)):
            made.write(lane="trainer", name=name, at=round(at * 1e6), end=round((at + lasts) * 1e6))
            at += lasts
        made.write(lane="sampler 0", name="generate", at=round((at - 60) * 1e6), end=round(at * 1e6))
    return folder


def test_two_programs_are_drawn_on_one_scale(tmp_path: Path) -> None:
    from rlcore.trace.gantt import draw_gantt

    folders = [rolled_out(tmp_path / name, waits_ms=ms) for name, ms in (("synchronous", 60), ("asynchronous", 5))]
    draw_gantt(folders, tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    assert all(
        f"<!-- {name}: {lane} -->" in drawn
        for name in ("synchronous", "asynchronous")
        for lane in ("trainer", "sampler 0")
    )
    assert "<!-- 0.25 -->" in drawn and "<!-- 0.5 -->" not in drawn, "the longest takes 276 ms from its first wait"
    draw_gantt(folders, tmp_path / "both")  # of no format: a PNG of this very name
    assert (tmp_path / "both").read_bytes().startswith(b"\x89PNG") and not (tmp_path / "both.png").exists()
    with pytest.raises(InvalidInputError, match=r"the picture cannot be written to .*both\.nothing"):
        draw_gantt(folders, tmp_path / "both.nothing")
    colocated(tmp_path)
    with pytest.raises(InvalidInputError, match="has nothing of a RolloutController to draw"):
        draw_gantt([tmp_path], tmp_path / "both.svg")


def test_programs_of_one_name_are_drawn_beside_each_other_by_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcore.trace.gantt import draw_gantt

    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        rolled_out(Path(name, "trace"), waits_ms=5)
    draw_gantt([Path("a/trace"), Path("b/trace")], tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    assert all(f"<!-- {name}/trace: trainer -->" in drawn for name in ("a", "b"))


def test_a_timeline_that_was_saved_is_drawn_without_a_trace(tmp_path: Path) -> None:
    from rlcore.trace.gantt import draw_gantt

    timeline = Timeline()
    for what in ("wait", "train", "evaluate"):
        timeline.begin("trainer", what)
    timeline.end("trainer")
    timeline.save(tmp_path / "apart.json")
    draw_gantt([tmp_path / "apart.json", rolled_out(tmp_path / "traced", waits_ms=5)], tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    assert "<!-- apart: trainer -->" in drawn and "<!-- traced: sampler 0 -->" in drawn
    (tmp_path / "config.json").write_text('{"steps": 1}')
    with pytest.raises(InvalidInputError, match=r"config\.json is no timeline that Timeline\.save\(\) wrote: "):
        draw_gantt([tmp_path / "config.json"], tmp_path / "both.svg")
