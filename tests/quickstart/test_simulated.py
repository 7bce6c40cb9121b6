"""A run on a simulated device says so, where it is read and where it is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlcore.devices.cpu.device import CpuMemory
from rlcore.devices.cpu.streams import CpuStreams
from rlcore.devices.generic import GenericTorchDevice
from rlcore.quickstart import run as quickstart
from rlcore.quickstart.config import QuickstartConfig
from rlcore.quickstart.output import PHASES
from rlcore.registry import registry
from rlcore.types import DeviceSpec, Evidence, Probe, Simulation

SPEC = DeviceSpec(
    name="acme", vendor="Acme", torch_type="cpu", priority=1, loader=f"{__name__}:SimulatedChip",
    collective_backend="gloo", api_version=(1, 0),
)  # fmt: skip


class SimulatedChip(GenericTorchDevice):
    memory_class = CpuMemory
    streams_class = CpuStreams
    evidence: ClassVar[Evidence] = "simulated"

    @classmethod
    def probe(cls, spec: DeviceSpec) -> Probe:
        return Probe(1)


class ShortRun:
    """It trains nothing: a run's folder and output are what is looked at."""

    def __init__(self, config: QuickstartConfig, folder: Any, *_: Any) -> None:
        self.folder = folder

    def run(self) -> None:
        self.folder.begin()
        times = {f"{phase}_s": 1.0 for phase in PHASES}
        self.folder.append({"step": 1, "reward": 0.5, "accuracy": 0.5, "parity": 0.0, **times})


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QuickstartConfig:
    monkeypatch.setitem(registry().devices, "acme", (SPEC, "cpu"))
    monkeypatch.setattr(quickstart, "Quickstart", ShortRun)
    return QuickstartConfig(device="acme", output=tmp_path / "run")


def test_output_and_record_say_what_is_simulated(
    config: QuickstartConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedChip, "simulation", lambda self: Simulation("simulated ACL", ("aten::exp",), ()))
    assert quickstart.run(config) == 0
    told = "acme:0 is simulated by simulated ACL"
    shown = capsys.readouterr()
    assert f"{told}: nothing here is a measurement of hardware" in shown.err
    assert any(line.split(maxsplit=1) == ["simulated", told] for line in shown.out.splitlines())
    assert json.loads((config.output / "run.json").read_bytes())["simulation"] == told


def test_a_run_on_hardware_says_nothing_of_it(config: QuickstartConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.run(replace(config, device="cpu")) == 0
    shown = capsys.readouterr()
    assert "simulated" not in shown.out + shown.err
    assert json.loads((config.output / "run.json").read_bytes())["simulation"] == ""


def test_a_run_that_was_simulated_once_stays_so(config: QuickstartConfig) -> None:
    begun = quickstart.with_simulation(config)
    assert begun.simulation == "acme:0 is simulated"
    assert quickstart.with_simulation(replace(begun, device="cpu")).simulation == "acme:0 is simulated"


def test_the_record_of_an_older_run_is_read(config: QuickstartConfig) -> None:
    record = json.loads(config.to_json())
    del record["simulation"]
    assert QuickstartConfig.from_json(json.dumps(record).encode()) == config
