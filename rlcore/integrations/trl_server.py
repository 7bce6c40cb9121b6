"""Weights of a TRL trainer into ``vllm serve`` on the same host, by rlcore's plan and not through a group of NCCL.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs \\
        --weight-transfer-config '{"backend": "rlcore_ipc"}'

    trainer = RlcoreGRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="server"))
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from trl.generation.vllm_client import VLLMClient

from rlcore.errors import SyncError, UnsupportedError
from rlcore.integrations.trl_vllm import merged, named_weights

_LONGEST_S = 300.0
"""The longest that a weight update may take, as in vLLM's own client."""


@contextlib.contextmanager
def weights_by_rlcore() -> Iterator[None]:
    """Inside, trainers that are made open no group of NCCL with their server, which has to take weights of rlcore.

    Raises:
        UnsupportedError: the server takes weights in another way.
    """
    original = VLLMClient.init_communicator
    VLLMClient.init_communicator = _check_backend
    try:
        yield
    finally:
        VLLMClient.init_communicator = original


def _check_backend(client: Any, device: Any = None) -> None:
    """Refuse a server with another weight transfer; takes the place of ``init_communicator``, and its arguments."""
    config = client.get_server_info()["weight_transfer_config"] or {}
    if config.get("backend") != "rlcore_ipc":
        raise UnsupportedError(
            f"the vLLM server at {client.base_url}, whose weight transfer is {config.get('backend')!r},",
            """restart it with --weight-transfer-config '{"backend": "rlcore_ipc"}', where rlcore is installed""",
        )


def takes_weights_of_rlcore(generation: Any) -> bool:
    """Return True if TRL's client, which the main process alone has, was made inside ``weights_by_rlcore()``."""
    client = getattr(generation, "vllm_client", None)
    return client is None or client.communicator is None


class ServedSync:
    """Replaces ``VLLMGeneration.sync_weights`` of the mode "server".

    Args:
        generation: TRL's, for which ``takes_weights_of_rlcore`` is True.
    """

    def __init__(self, generation: Any) -> None:
        self._generation = generation
        self._engine: Any = None

    def __call__(self) -> None:
        """Give the server the trainer's weights; all ranks call it together.

        Raises:
            SyncError: what went wrong, and whether the server's weights are whole.
        """
        generation = self._generation
        with merged(generation.model):
            self._connected().send_weights()
        if generation.accelerator.is_main_process:
            generation.vllm_client.reset_prefix_cache()

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return the weights: this object is the source of rlcore's trainer engine, which reads them in place."""
        return named_weights(self._generation.model).items()

    def _connected(self) -> Any:
        if self._engine is None:
            # vLLM is needed here and not where TRL alone is imported.
            from rlcore.engines.sampling.vllm.trainer import RlcoreTrainerInitInfo, RlcoreTrainerWeightTransferEngine

            accelerator = self._generation.accelerator
            client = getattr(self._generation, "vllm_client", None)
            with tempfile.TemporaryDirectory(prefix="rlcore-") as folder:
                info = RlcoreTrainerInitInfo(
                    str(Path(folder, "weights")),
                    num_workers=client.get_world_size() if client is not None else 1,
                    rank=accelerator.process_index,
                )
                self._engine = RlcoreTrainerWeightTransferEngine.trainer_init(
                    init_info=info, client=_ServerClient(getattr(client, "base_url", "")), source=self
                )
        return self._engine


class _ServerClient:
    """The server, as a trainer engine asks it. TRL's own session would ask again after an error, in another round."""

    def __init__(self, url: str) -> None:
        self._url = url

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", **({} if weight_version is None else {"weight_version": weight_version}))

    def _post(self, path: str, **content: Any) -> None:
        import requests

        answer = requests.post(f"{self._url}/{path}", json=content, timeout=_LONGEST_S)
        if not answer.ok:
            raise SyncError(f"the vLLM server at {self._url} refused /{path}, as its log says: {answer.text[:300]}")
