"""Other processes for the tests of what devices share between processes."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.warm import TorchPopen

ANSWER_TIMEOUT_S = 120  # of a process that imports torch and makes a CUDA context on a busy machine


class PeerError(Exception):
    """The code failed in the other process; the text is "Type: message"."""


class Peer:
    """Another Python process with the same device; see peer.py."""

    def __init__(self, device_name: str, env: dict[str, str]) -> None:
        self.process = TorchPopen(
            [sys.executable, str(Path(__file__).parent / "peer.py"), device_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | env,
            text=True,
        )
        self.pid = self.process.pid

    def run(self, code: str, **values: Any) -> Any:
        """Run code there; what it leaves in ``result``. Names stay for the next call."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"code": code, "values": values}) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_TIMEOUT_S)
        if not ready:
            self.kill()  # or its answer would be taken for that to the next request
            raise AssertionError(f"no answer to: {code}")
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["result"]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.kill()  # a stopped one too
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(autouse=True)
def _no_garbage(request: pytest.FixtureRequest) -> None:
    """What a failed or finished test still holds of a GPU would be freed in the midst of another's count."""
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("multigpu"):
        gc.collect()


MakePeer = Callable[..., Peer]


@pytest.fixture
def runtime_folder(short_runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    return short_runtime_folder


@pytest.fixture
def make_peer(device: Any, runtime_folder: Path) -> Iterator[MakePeer]:
    """For tests that end or spoil the process."""
    peers = []

    def make(device_name: str = "", **env: str) -> Peer:
        peers.append(Peer(device_name or device.name, env))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture(scope="session")
def _peers() -> Iterator[dict[str, Peer]]:
    peers: dict[str, Peer] = {}
    yield peers
    for peer in peers.values():
        peer.close()


@pytest.fixture
def peer(device: Any, runtime_folder: Path, _peers: dict[str, Peer]) -> Peer:
    """One process for many tests, because it imports torch first."""
    known = _peers.get(device.name)
    if known is None or known.process.poll() is not None:
        if known is not None:
            known.close()
        known = _peers[device.name] = Peer(device.name, {})
    return known


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
