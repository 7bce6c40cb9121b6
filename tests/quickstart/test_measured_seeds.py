"""The program that runs seeds of the quickstart, without its runs; and the page, which has the table of its records."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlcore.bench.cases.quickstart import QuickstartRun
from tests.quickstart import measured_seeds

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "bench" / "results" / "quickstart").glob("*.json"))


def test_the_page_has_the_table_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    measured_seeds.main(["table", *map(str, RECORDS)])
    assert capsys.readouterr().out in (ROOT / "docs" / "quickstart.md").read_text()


def test_each_run_has_the_threads_and_instructions_that_its_record_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # restored afterwards
    asked = []

    def quickstart(device: str, seed: int, *options: str) -> QuickstartRun:
        asked.append((os.environ["ATEN_CPU_CAPABILITY"], *options, seed))
        return QuickstartRun([{"accuracy": 0.25}, {}, {"accuracy": 1 - seed / 100}], 0.0)

    monkeypatch.setattr(measured_seeds, "quickstart", quickstart)
    words = ["--first", "3", "--seeds", "2", "--threads", "1", "2", "--instructions", "avx512", "avx2"]
    measured_seeds.main(["run", str(tmp_path / "new" / "seeds.json"), *words])
    runs = json.loads((tmp_path / "new" / "seeds.json").read_text())["runs"]
    found = [(one["instructions"], "--threads", str(one["threads"]), one["seed"]) for one in runs]
    assert len(found) == 8 and found == sorted(asked)
    assert runs[0]["accuracy_before"] == 0.25 and runs[0]["accuracy"] == 0.97
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[1:] for row in rows] == [
        [threads, instructions, "2", "96.0 %", "96.50 % |"] for threads in "12" for instructions in ("avx2", "avx512")
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "arguments are required: what"),
        (["table"], "arguments are required: files"),
        (["seeds.json"], "invalid choice: 'seeds.json'"),
        (["run", "seeds.json", "--instructions", "avx1024"], "invalid choice: 'avx1024'"),
    ],
)
def test_wrong_words_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measured_seeds.main(words)
    assert told in capsys.readouterr().err
