"""``vllm serve`` that takes weights by ``rlcore_ipc``, for tests of what asks it over HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .stock import MAX_TOKENS, PROMPTS

START_S = 400


class Server:
    """The module that ``vllm serve`` runs, in a process of its own; usable once it has said that it is healthy."""

    def __init__(self, folder: Path, log: Path, variables: dict[str, str], *options: str) -> None:
        self._model, self._log = str(folder), log
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self._model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--weight-transfer-config", '{"backend": "rlcore_ipc"}']
        command += ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
        command += ["--kv-cache-memory-bytes", str(1 << 24), "--gpu-memory-utilization", "0.01", *options]
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
