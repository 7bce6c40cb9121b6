"""The JSON Schema in the package: what rlcore writes fits it, what rlcore refuses does not, and errors say the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rlcore.bench import record as record_module
from rlcore.bench.record import json_schema, line_of, read
from rlcore.errors import BenchError

SHIPPED = Path(record_module.__file__).with_name("record.schema.json")
RECORDS = sorted((Path(__file__).resolve().parents[2] / "bench" / "results").glob("*.json"))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(SHIPPED.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_shipped_schema_is_the_one_of_the_code() -> None:
    assert SHIPPED.read_text() == json.dumps(json_schema(), indent=2) + "\n", "run: make results"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_records_of_the_repository_fit_it(path: Path, validator: Any) -> None:
    read(path)
    assert [error.message for error in validator.iter_errors(json.loads(path.read_text()))] == []


def wrong(change: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORDS[0].read_text())
    case = next(case for case in record["cases"] if case["status"] == "pass")
    changes = {
        "foreign": lambda: record.update(schema="asv/2"),
        "no system": lambda: record.pop("system"),
        "unknown field": lambda: case.update(price=3),
        "unknown status": lambda: case.update(status="fast"),
        "pass without metrics": lambda: case.update(metrics=[]),
        "pass without a time": lambda: [metric.update(name=f"not {metric['name']}") for metric in case["metrics"]],
        "number without pass": lambda: case.update(status="fail", reason="x"),
        "no reason": lambda: case.update(status="fail", reason="", metrics=[]),
        "no samples": lambda: case["metrics"][0].update(samples=[]),
        "zero": lambda: case["metrics"][0].update(samples=[0.0]),
        "negative operations": lambda: case.update(flops=-5),
        "no threads": lambda: record.update(num_threads=0),
    }
    changes[change]()
    return record


CHANGES = ("foreign", "no system", "unknown field", "unknown status", "pass without metrics", "pass without a time")
MORE_CHANGES = ("number without pass", "no reason", "no samples", "zero", "negative operations", "no threads")


@pytest.mark.parametrize("change", [*CHANGES, *MORE_CHANGES])
def test_schema_and_reader_refuse_the_same(change: str, validator: Any, tmp_path: Path) -> None:
    record = wrong(change)
    assert not validator.is_valid(record)
    (tmp_path / "wrong.json").write_text(json.dumps(record))
    with pytest.raises(BenchError, match=r"wrong\.json is no rlcore\.bench/1 record: "):
        read(tmp_path / "wrong.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "schema": "rlcore.bench/1",\n "rlcore": 3\n}', "Expected `str`, got `int` - at `$.rlcore` (line 3)"),
        ('{\n "schema":\n  "asv/2"\n}', "Invalid enum value 'asv/2' - at `$.schema` (line 3)"),
        ('{\n "schema": nothing\n}', "JSON is malformed: invalid character (byte 17) (line 2)"),
        ('{\n "schema": "rlcore.bench/1",\n "x": 1\n}', "unknown field `x` (line 3)"),
        ('{\n "schema": "rlcore.bench/1",\n', "Input data was truncated (line 3)"),
    ],
)  # fmt: skip
def test_error_says_the_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(BenchError) as caught:
        read(tmp_path / "wrong.json")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "line"),
    [("$", 1), ("$.a", 2), ("$.b", 3), ("$.b[0]", 4), ("$.b[1].c", 6), ("$.b[2]", 7), ("$.b[9]", 3), ("$.x", 1)],
)
def test_line_of_a_value(path: str, line: int) -> None:
    text = b'{\n "a": {"b": [1]},\n "b": [\n  "x, ]",\n  {"d": "}",\n   "c": null},\n  2\n ]\n}'
    assert line_of(text, path) == line
