"""Engines of the executor under test, and of the built-in one that stands on the other side of a weight sync.

An engine is built once for many tests, which leave it as it was: else the next one gets another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.conformance.tiny_model import policy
from rlcore.device import Device
from rlcore.errors import RlcoreError, UnsupportedError

TIMEOUT_S = 300.0
"""The longest time that one call of a worker may take."""


@dataclass
class UnderTest:
    """The executor, its device, and engines of it by how they were built."""

    kind: str
    name: str
    device: Device
    folder: Path
    """A model folder."""
    options: Mapping[str, Any]
    _engines: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: pytest.Config, kind: str, folder: Path) -> UnderTest:
        device = rlcore.get_device(config.getoption("--device"))
        name = config.getoption(f"--{kind}-executor")
        return cls(kind, name, device, folder, config.getoption("--build-options"))

    def device_name(self, place: int) -> str:
        """Return the device under test for 0, and others for more as far as there are some."""
        kind, count = self.device.spec, self.device.count()
        return f"{kind.name}:{(self.device.index + place) % (max(count, place + 1) if kind.is_host else count)}"

    def device_names(self, count: int) -> list[str]:
        """Return so many devices, the one under test first; raises UnsupportedError where there are not so many."""
        names = [self.device_name(place) for place in range(count)]
        if len(set(names)) < count:
            raise UnsupportedError(f"{count} workers", f"there are {len(set(names))} devices {self.device.spec.name!r}")
        return names

    def inference(self, folder: Path | None = None, **options: Any) -> Any:
        """Build an inference engine, of the executor under test if that is one; the caller closes it."""
        is_tested = self.kind == "inference"
        engine = rlcore.InferenceEngine(folder or self.folder, executor=self.name if is_tested else "hf")
        return self._built(engine, is_tested, options)

    def train(self, folder: Path | None = None, **options: Any) -> Any:
        """Build a train engine, of the executor under test if that is one; the caller closes it."""
        is_tested = self.kind == "train"
        with rlcore.meta_device():
            module = policy(folder or self.folder)
        engine = rlcore.TrainEngine(module, executor=self.name if is_tested else "fsdp2")
        return self._built(engine, is_tested, options)

    def _built(self, engine: Any, is_tested: bool, options: dict[str, Any]) -> Any:
        given: dict[str, Any] = {"devices": self.device.name, "timeout_s": TIMEOUT_S}
        given |= (dict(self.options) if is_tested else {}) | options
        try:
            return engine.build(**given)
        except BaseException:
            engine.close()
            raise

    def kept(self, key: str, make: Callable[[], Any], mend: Callable[[Any], None]) -> Any:
        """Return the engine that an earlier test got by this key, mended; or a new one, if none can be mended."""
        engine = self._engines.get(key)
        if engine is not None:
            try:
                mend(engine)
                return engine
            except RlcoreError:
                self._engines.pop(key)
                engine.close()
        engine = self._engines[key] = make()
        return engine

    def release_processes(self) -> None:
        """Close the kept engines elsewhere than in this process: workers of one device may share a process."""
        for key, engine in list(self._engines.items()):
            if any(worker.process_id != os.getpid() for worker in engine.executors[0].workers):
                self._engines.pop(key).close()

    def close(self) -> None:
        while self._engines:
            self._engines.popitem()[1].close()


def mend_inference(engine: Any) -> None:
    """Give the engine its own folder's weights again, everything on the device and nothing under way."""
    if set(engine.state.values()) != {"loaded"}:
        engine.onload()
    engine.resume()
    engine.abort()
    if engine.version or engine.sync_state != "serving" or engine.state["weights"] != "loaded":
        engine.load()


def new_train(under_test: UnderTest, **options: Any) -> Any:
    engine = under_test.train(**options)
    engine.initial = engine.state_dict()
    return engine


def mend_train(engine: Any) -> None:
    """Give the engine its first weights and a new optimizer."""
    if set(engine.state.values()) != {"loaded"}:
        engine.restart()
    engine.load_state_dict(engine.initial)
    engine.call("forget_steps")


def nbytes(engine: Any, tag: str) -> tuple[int, int]:
    """Return what the tag takes on the devices, and in host memory."""
    tags = [report["tags"][tag] for report in engine.memory_report()]
    return sum(one["device_bytes"] for one in tags), sum(one["host_bytes"] for one in tags)


def same_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Bit for bit, of weights that were moved and not computed."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
