"""A launcher is a registration: a plugin's is chosen by name, told all there is to know, and used like rlcore's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlcore.engines.launchers.base import LaunchOptions, WorkerPlacement
from rlcore.engines.launchers.inline import InlineLauncher
from rlcore.engines.launchers.launch import choose_launcher, start_workers
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import InvalidInputError, PluginError
from rlcore.registry import Registry, launcher_names, registry


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.host = context.host

    def on_host(self) -> str:
        return self.host

    def close(self) -> None:
        pass


class RecordingLauncher(InlineLauncher):
    seen: tuple[Sequence[WorkerPlacement], LaunchOptions]

    def start(self, worker_class: type[Any], placements: Sequence[WorkerPlacement], options: LaunchOptions) -> Any:
        RecordingLauncher.seen = placements, options
        return super().start(worker_class, placements[:1], options)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(registry().launchers, "recording", (f"{__name__}:RecordingLauncher", "a plugin"))
    return "recording"


def test_a_plugins_launcher_starts_the_workers_of_an_executor(recording: str) -> None:
    assert choose_launcher(recording, 2) == recording
    devices = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    group = start_workers(Worker, "the engine", devices, launcher=recording, timeout_s=9, devices_each=2)
    placements, options = RecordingLauncher.seen
    assert [placement.devices for placement in placements] == [("cpu:0", "cpu:1"), ("cpu:2", "cpu:3")]
    assert options == LaunchOptions(engine="the engine", timeout_s=9)
    assert group.call("on_host", [((), {})]) == [group.workers[0].context.host]
    group.stop()


def test_an_unknown_launcher_is_refused_with_the_names_of_all() -> None:
    assert launcher_names() == ["inline", "process", "ray", "torchrun"]
    with pytest.raises(InvalidInputError, match="launcher must be one of inline, process, ray, torchrun, got 'slurm'"):
        choose_launcher("slurm", 1)


def test_two_launchers_of_one_name_are_refused() -> None:
    class Hooks:
        def __getattr__(self, hook: str) -> Any:
            return lambda register: register("here", "acme:Launcher") if hook.endswith("launchers") else None

    found = Registry()
    found.collect("acme", Hooks())()
    assert found.launchers == {"here": ("acme:Launcher", "acme")}
    with pytest.raises(PluginError, match="launcher 'here' is already registered by plugin 'acme'"):
        found.collect("other", Hooks())
