"""The offload cases pass on a host, and refuse what came back wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from once import run_once

from rlcore.bench.case import load_cases
from rlcore.bench.cases import offload
from rlcore.engines.offload.device_to_host import DeviceToHost
from rlcore.engines.offload.host_arena import arena_of
from rlcore.registry import get_device

CONTENDERS = {
    "offload/cycle": ["arena"],
    "offload/first": ["arena", "arena_reserved", "torch_pin_memory"],
    "offload/swap": ["swap", "one_after_the_other"],
    "offload/five_engines": ["swap", "one_after_the_other"],
}
BY_DEFAULT = ("offload/cycle", "offload/first")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(offload, "_BYTES_ON_HOST", 1 << 20)
    yield
    arena_of(get_device("cpu")).trim()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in BY_DEFAULT)) for name in CONTENDERS]
)
def test_offload_case_passes_and_gives_shares_of_the_link(name: str) -> None:
    results = run_once(name)
    assert [(result.implementation, result.status, result.reason) for result in results] == [
        (contender, "pass", "") for contender in CONTENDERS[name]
    ]
    for result in results:
        metrics = {metric.name: metric.samples for metric in result.metrics}
        for way in ("to_host", "to_device"):
            shares = zip(metrics[way], metrics[f"link_{way}"], metrics[f"{way}_of_link"], strict=True)
            assert all(rate / link == pytest.approx(share) for rate, link, share in shares)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in BY_DEFAULT)) for name in CONTENDERS]
)
def test_offload_case_refuses_other_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = DeviceToHost.complete

    def spoil(self: DeviceToHost, chunk: Any) -> None:
        chunk.block.tensor[:4] ^= 255
        complete(self, chunk)

    work = load_cases()[name].prepare(get_device("cpu"))
    monkeypatch.setattr(DeviceToHost, "complete", spoil)
    contender = work.contenders[0]
    moved = contender.run()
    if name == "offload/swap":
        moved = contender.run()
    with pytest.raises(AssertionError, match="other values came back"):
        contender.check(moved)
