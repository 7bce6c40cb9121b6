"""``vllm serve`` takes weights from another process, asked over HTTP by vLLM's own client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .server import Server
from .stock import environment, greedy, policy, shake, vllms_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


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
