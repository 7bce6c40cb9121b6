"""A stock ``vllm.LLM`` takes weights from another process, by a ``WeightSender`` or vLLM's own trainer's interface."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.engines.weight_sync.channels.connections import accept_controls

from .stock import environment, greedy, policy, shake, vllms_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


class StockLLM:
    """The program ``stock_llm.py`` in a process of its own."""

    def __init__(self, folder: Path, size: int, variables: dict[str, str]) -> None:
        self._files = tempfile.TemporaryDirectory()
        self.address = Path(self._files.name) / "weights"
        self._log = (Path(self._files.name) / "log").open("w+")
        command = [
            sys.executable,
            str(Path(__file__).with_name("stock_llm.py")),
            str(folder),
            str(self.address),
            str(size),
        ]
        pipe = subprocess.PIPE
        self.first: dict[str, Any] = {}
        self.process = subprocess.Popen(
            command, env=variables, stdin=pipe, stdout=pipe, stderr=self._log, text=True, start_new_session=True
        )

    def ask(self, *, connects: bool = False, timeout_s: float = 120.0) -> None:
        """For an update, and completions after it."""
        init = {"init_info": {"address": str(self.address), "timeout_s": timeout_s}}
        update = {"update_info": {"timeout_s": timeout_s}}
        self.begin(
            *([("init_weight_transfer_engine", init)] if connects else []),
            ("start_weight_update",),
            ("update_weights", update),
            ("finish_weight_update",),
            ("reset_prefix_cache",),
            ("answer",),
        )

    def begin(self, *calls: tuple[Any, ...]) -> None:
        assert self.process.stdin
        print(json.dumps(calls), file=self.process.stdin, flush=True)

    def call(self, *call: Any) -> dict[str, Any]:
        self.begin(call)
        found = self.answer()
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("ANSWER"):
                return json.loads(line.removeprefix("ANSWER"))
        self._log.seek(0)
        raise AssertionError(f"it ended with {self.process.wait()}: {self._log.read()[-4000:]}")

    # As vLLM's clients, for a trainer of vLLM's own interface.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update")

    def close(self) -> None:
        """It ends by itself after the last line, for killed it would leave names in /dev/shm."""
        assert self.process.stdin
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # vLLM's engine is a child that has the pipes too
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()
        self._log.close()
        self._files.cleanup()


@pytest.fixture(scope="module")
def stock(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockLLM]:
    program = StockLLM(model_folder, 1, environment(tmp_path_factory.mktemp("installed")))
    try:
        program.first = program.answer()
        yield program
    finally:
        program.close()


def test_it_generates_with_the_senders_weights(stock: StockLLM, model_folder: Path) -> None:
    module = policy(model_folder)
    assert stock.first == {"tokens": greedy(module)}
    stock.ask(timeout_s=1)
    assert "call init_weight_transfer_engine" in stock.answer()["error"]
    stock.ask(connects=True, timeout_s=1)
    assert "no weight sender listens at" in stock.answer()["error"]

    stock.ask(connects=True)
    controls = accept_controls(stock.address, 1, timeout_s=300)
    assert not stock.address.exists()
    sender = rlcore.WeightSender(module.named_parameters, controls)
    for version in (1, 2):
        shake(module, version)
        if version > 1:
            stock.ask()
        report = sender.send()
        assert (report.version, report.fallback_bytes) == (version, 0)
        assert stock.answer() == {"tokens": greedy(module)}

    stock.ask(timeout_s=1)  # nobody sends: the weights are whole, and it goes on with them
    failed = stock.answer()["error"]
    assert "nothing came from the sender within 1 s. The model's weights are whole" in failed
    for control in controls:
        control.close()
    stock.ask()
    assert "the sender is gone" in stock.answer()["error"]

    stock.ask(connects=True)
    controls = accept_controls(stock.address, 1, timeout_s=300)
    shake(module, 3)
    with contextlib.closing(controls[0]):
        rlcore.WeightSender(module.named_parameters, controls).send(verify=True)
        assert stock.answer() == {"tokens": greedy(module)}


@pytest.mark.parametrize("kind", ["ModuleWeights", "ModuleSource"])
def test_a_trainer_of_vllms_own_interface_gives_it_weights(kind: str, stock: StockLLM, model_folder: Path) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource, TrainerWeightTransferEngine

    from rlcore.engines.sampling.vllm.trainer import ModuleWeights, RlcoreTrainerInitInfo

    module = policy(model_folder)
    source = {"ModuleWeights": ModuleWeights, "ModuleSource": ModuleSource}[kind](module)
    info = RlcoreTrainerInitInfo(str(stock.address), timeout_s=300)
    engine = vllms_trainer(info, stock, source)
    assert isinstance(engine, TrainerWeightTransferEngine)
    with contextlib.ExitStack() as ended:
        ended.callback(engine.shutdown)
        for version in (1, 2):
            shake(module, 10 + version)
            report: Any = engine.send_weights()
            assert (report.version, report.fallback_bytes) == (version, 0)
            stock.call("reset_prefix_cache")
            assert stock.call("answer") == {"tokens": greedy(module)}
