"""`rlcore tune`: what it finds is kept and used; what is damaged or foreign is not; wrong candidates are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.device import Device
from rlcore.errors import RlcoreError, UnsupportedError
from rlcore.kernels import tile_choices, tuning
from rlcore.kernels.tile_choices import CANDIDATES, TunedTiles, identity, keep, path_of, tile, trying, tuned
from rlcore.kernels.tuning import TimedWork, tune
from rlcore.registry import get_device

NAME, OTHER = "gradient of rows", CANDIDATES["gradient of rows"][2]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    tile_choices._kept.cache_clear()
    yield
    tile_choices._kept.cache_clear()


def found_on(device_name: str, chosen: Any = OTHER) -> TunedTiles:
    _, triton, own = identity(device_name)
    return TunedTiles(device=device_name, triton=triton, rlcore=own, tiles={NAME: dict(chosen)}, milliseconds={})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a device that says it is no host."""

    class Spec:
        name, is_host = "cuda", False

    class Stand:
        @staticmethod
        def properties() -> Any:
            return type("Properties", (), {"name": "GPU 9/x"})

    monkeypatch.setattr(tile_choices, "specs_of", lambda device_type: [Spec])
    monkeypatch.setattr(tile_choices, "get_device", lambda name: Stand)
    return "GPU 9/x"


def test_usual_tiles_without_a_file_and_on_hosts(gpu: str) -> None:
    assert all(tile(name, "cuda") is candidates[0] for name, candidates in CANDIDATES.items())


def test_what_was_kept_is_used_for_its_family_alone(gpu: str) -> None:
    path = keep(found_on(gpu))
    assert path.name == "GPU-9-x.json"
    assert tile(NAME, "cuda") == OTHER
    assert tile("product of tiles", "cuda") is CANDIDATES["product of tiles"][0]
    with trying(NAME, CANDIDATES[NAME][1]):
        assert tile(NAME, "cuda") == CANDIDATES[NAME][1]
    assert tile(NAME, "cuda") == OTHER


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda text: text[: len(text) // 2], "is not used: .*; run rlcore tune again"),
        (lambda text: text.replace("1024", "1000"), "names tiles of gradient of rows that are no candidates"),
        (lambda text: text.replace(NAME, "another kernel"), "names tiles of another kernel that are no candidates"),
        (lambda text: text.replace("GPU 9/x", "GPU 8"), ""),
        (lambda text: text.replace('"rlcore": "', '"rlcore": "9.'), ""),
    ],
    ids=["cut", "no candidate", "no kernel", "another device", "another version"],
)
def test_a_file_that_is_damaged_or_of_something_else_is_not_used(
    gpu: str, harm: Callable[[str], str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = keep(found_on(gpu))
    text = path.read_text()
    assert harm(text) != text
    path.write_text(harm(text))
    assert tuned(gpu) is None
    assert tile(NAME, "cuda") is CANDIDATES[NAME][0]
    assert re.search(words, caplog.text) if words else not caplog.text


def stand_in(monkeypatch: pytest.MonkeyPatch, most: float = 1.0) -> tuple[Device, list[str]]:
    """The families of rows, whose times are the positions of candidates; the gradient's third is the fastest."""
    ran: list[str] = []

    def work(name: str) -> Callable[[torch.device], TimedWork | None]:
        def run() -> None:
            ran.append(f"{name}: {dict(tile(name, 'cpu'))}")

        return lambda device: None if name == "product of tiles" else TimedWork(run, lambda: 0.5, most)

    monkeypatch.setattr(tuning, "_WORK", {name: work(name) for name in CANDIDATES})
    return get_device("cpu"), ran


def clock(ran: list[str], times: dict[str, float]) -> Callable[[Callable[[], object]], float]:
    def measured(run: Callable[[], object]) -> float:
        run()
        return times.get(ran[-1], 10.0)

    return measured


def test_the_fastest_candidate_is_chosen_and_chance_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device, ran = stand_in(monkeypatch)
    a_little = f"statistics of rows: {dict(CANDIDATES['statistics of rows'][1])}"
    found = tune(device, clock(ran, {f"{NAME}: {dict(OTHER)}": 8.0, a_little: 9.95}))
    assert found.tiles == {"statistics of rows": dict(CANDIDATES["statistics of rows"][0]), NAME: dict(OTHER)}
    assert found.milliseconds[NAME][str(OTHER)] == 8.0
    assert len(ran) == 3 * (len(CANDIDATES["statistics of rows"]) + len(CANDIDATES[NAME]))


@pytest.mark.parametrize("most", [0.4, float("nan")])
def test_a_candidate_that_is_wrong_is_an_error(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device, ran = stand_in(monkeypatch, most)
    with pytest.raises(RlcoreError, match=r"statistics of rows with the tile .* is wrong by 5.0e-01"):
        tune(device, clock(ran, {}))


def test_a_device_that_runs_no_kernel_of_triton_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"tuning cpu.* none of Triton's kernels runs there"):
        tune(get_device("cpu"))


def test_the_command_prints_and_keeps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from rlcore.cli.main import app

    monkeypatch.setattr(tuning, "tune", lambda device: found_on("GPU 9/x"))
    result = CliRunner().invoke(app, ["tune", "--device", "cpu", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["tiles"] == {NAME: dict(OTHER)}
    assert path_of("GPU 9/x").exists()


def test_the_works_are_right_where_the_definition_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checks, on the host: the plain implementation stands for Triton's."""
    monkeypatch.setattr(tuning, "_ROWS", 70)
    monkeypatch.setattr(tuning, "_COLUMNS", 300)
    monkeypatch.setattr(tuning, "_HEAD", (70, 16, 300))
    chosen = {"token_logprob": "triton", "linear_logprob": "tiled"}
    monkeypatch.setattr(tuning, "choose", lambda op, query: type("Choice", (), {"implementation": chosen[op]}))
    torch.manual_seed(0)
    for make in tuning._WORK.values():
        work = make(torch.device("cpu"))
        assert work is not None
        work.run()
        assert 0 < work.error() < work.most
