"""``vllm serve`` takes weights from another process, asked over HTTP by vLLM's own client."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .stock import MAX_TOKENS, PROMPTS, environment, greedy, policy, shake, vllms_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 400


class Server:
    """The module that ``vllm serve`` runs, in a process of its own; usable once it has said that it is healthy."""

    def __init__(self, folder: Path, log: Path, variables: dict[str, str]) -> None:
        self._model, self._log = str(folder), log
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self._model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--weight-transfer-config", '{"backend": "rlcore_ipc"}']
        command += ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
        command += ["--kv-cache-memory-bytes", str(1 << 24), "--gpu-memory-utilization", "0.01"]
        variables = variables | {"VLLM_SERVER_DEV_MODE": "1"}
        with log.open("w") as said:
            self._process = subprocess.Popen(
                command, env=variables, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        import requests

        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(requests.ConnectionError):
                requests.get(f"{self.url}/health", timeout=10).raise_for_status()
                return
            time.sleep(0.5)
        raise AssertionError(f"it is not there: {self._log.read_text()[-4000:]}")

    def tokens(self) -> list[list[int]]:
        self.post("reset_prefix_cache")
        wanted: dict[str, Any] = {"model": self._model, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        wanted |= {"prompt": PROMPTS, "return_token_ids": True}
        return [choice["token_ids"] for choice in self.post("v1/completions", wanted).json()["choices"]]

    def post(self, path: str, json: Any = None) -> Any:
        import requests

        response = requests.post(f"{self.url}/{path}", json=json, timeout=120)
        response.raise_for_status()
        return response

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    program = Server(model_folder, log, environment(tmp_path_factory.mktemp("installed")))
    try:
        program.wait()
        yield program
    finally:
        program.close()


def test_a_server_generates_with_the_trainers_weights(server: Server, model_folder: Path, tmp_path: Path) -> None:
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    from rlcore.engines.sampling.vllm.trainer import ModuleWeights, RlcoreTrainerInitInfo

    module = policy(model_folder)
    assert server.tokens() == greedy(module)
    info = RlcoreTrainerInitInfo(str(tmp_path / "weights"), timeout_s=120)
    engine = vllms_trainer(info, HTTPVLLMWeightSyncClient(server.url), ModuleWeights(module))
    with contextlib.ExitStack() as ended:
        ended.callback(engine.shutdown)
        for version in (1, 2):
            shake(module, version)
            report: Any = engine.send_weights()
            assert (report.version, report.fallback_bytes) == (version, 0)
            assert server.tokens() == greedy(module)
