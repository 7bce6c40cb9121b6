"""A stock ``vllm.LLM`` takes weights from another process, by a ``WeightSender`` or vLLM's own trainer's interface."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.engines.sync.control_socket import accept_controls

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[3]
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


class StockLLM:
    """The program ``stock_llm.py`` in a process of its own."""

    def __init__(self, folder: Path, size: int, entry_points: Path) -> None:
        self._files = tempfile.TemporaryDirectory()
        self.address = Path(self._files.name) / "weights"
        self._log = (Path(self._files.name) / "log").open("w+")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(entry_points), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "TRITON_F32_DEFAULT": "ieee",  # on a GPU vLLM's attention would take TF32, and the tokens are compared
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled at the start, and greedy completions need none
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "RLCORE_VLLM_PLAIN_WEIGHTS": "1",  # means something on a CPU only
        }
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
            command, env=environment, stdin=pipe, stdout=pipe, stderr=self._log, text=True, start_new_session=True
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
def entry_points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip writes of the project's entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path_factory.mktemp("installed") / "rlcore-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlcore\nVersion: 0\n")
    lines = "\n".join(f"{name} = {path}" for name, path in project["entry-points"]["vllm.general_plugins"].items())
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{lines}\n")
    return info.parent


@pytest.fixture(scope="module")
def stock(model_folder: Path, entry_points: Path) -> Iterator[StockLLM]:
    program = StockLLM(model_folder, 1, entry_points)
    try:
        program.first = program.answer()
        yield program
    finally:
        program.close()


def policy(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)


@torch.no_grad()
def shake(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.add_(noise * 0.2 * parameter.std())


def greedy(module: Any) -> list[list[int]]:
    found = []
    for prompt in ([9, 0, 2, 1], [3]):
        ids = torch.tensor([prompt], device=DEVICE)
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": [], "pad_token_id": 0}
        made = module.generate(ids, do_sample=False, max_new_tokens=12, **options)
        found.append(made[0, len(prompt) :].tolist())
    return found


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
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from rlcore.engines.executors.vllm.trainer import ModuleWeights, RlcoreTrainerInitInfo

    module: Any = policy(model_folder)
    source = {"ModuleWeights": ModuleWeights, "ModuleSource": ModuleSource}[kind](module)
    info = RlcoreTrainerInitInfo(str(stock.address), timeout_s=300)
    trainer_init: Any = WeightTransferTrainerFactory.trainer_init
    is_first = "config" in trainer_init.__func__.__code__.co_varnames[: trainer_init.__func__.__code__.co_argcount]
    before = {"backend": "rlcore_ipc", "config": None} if is_first else {}
    engine = trainer_init(**before, init_info=info, client=stock, source=source)
    assert isinstance(engine, TrainerWeightTransferEngine)
    with contextlib.ExitStack() as ended:
        ended.callback(engine.shutdown)
        for version in (1, 2):
            shake(module, 10 + version)
            report: Any = engine.send_weights()
            assert (report.version, report.fallback_bytes) == (version, 0)
            stock.call("reset_prefix_cache")
            assert stock.call("answer") == {"tokens": greedy(module)}
