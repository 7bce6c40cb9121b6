"""``ServiceClient``, with Tinker's methods: it builds the engines of a base model, and makes their clients."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from rlcore.arguments import COUNT, FLAG, MAPPING, PATH, SECONDS, WHOLE, optional, takes
from rlcore.compat.tinker.futures import ClientFuture, ends
from rlcore.compat.tinker.host import ModelHost
from rlcore.compat.tinker.module import lora_module
from rlcore.compat.tinker.sampling_client import SamplingClient
from rlcore.compat.tinker.training_client import TrainingClient
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.errors import InvalidInputError, StateError, UnsupportedError


class ServiceClient:
    """Makes clients. Models are folders of this machine, and engines are built here: there is no service.

    Args:
        folder: where ``save_state`` writes.
        trainer: arguments of ``rlcore.TrainEngine.build``, such as {"devices": "cuda:0"}.
        sampler: those of ``rlcore.InferenceEngine.build``, and ``executor``. Without ``devices`` it shares the
            trainer's.
        unhealthy_after_s: a sampler in a process of its own that does not answer for so long, as a stopped one does, is
            restarted, and what it had under way begins anew.
    """

    @takes(
        "ServiceClient",
        folder=PATH,
        trainer=optional(MAPPING),
        sampler=optional(MAPPING),
        unhealthy_after_s=SECONDS,
    )
    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        folder: str | Path = "tinker-states",
        trainer: Mapping[str, Any] | None = None,
        sampler: Mapping[str, Any] | None = None,
        unhealthy_after_s: float = 60.0,
    ) -> None:
        self._unhealthy_after_s = unhealthy_after_s
        self._folder, self._trainer, self._sampler = Path(folder), dict(trainer or {}), dict(sampler or {})
        if self._trainer.get("data_parallel_size", 1) != 1:
            raise UnsupportedError("trainer data_parallel_size above 1", "gradients add up in one worker")
        self._hosts: dict[str, ModelHost] = {}
        self._clients: dict[str, TrainingClient] = {}
        self._is_closed = False

    @takes(
        "create_lora_training_client()",
        base_model=PATH,
        rank=COUNT,
        seed=optional(WHOLE),
        train_mlp=FLAG,
        train_attn=FLAG,
    )
    def create_lora_training_client(  # noqa: PLR0917  # Tinker's own
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
    ) -> ClientFuture[TrainingClient]:
        """Return a client that trains new adapters of a model folder; one for each base model.

        ``train_unembed`` does nothing: the output head gets no adapter.
        """
        base_model = str(base_model)
        if not (train_mlp or train_attn):
            raise InvalidInputError(
                "create_lora_training_client() needs train_mlp or train_attn: it has no other adapters"
            )
        if base_model in self._clients:
            raise StateError(
                f"{base_model} has a client already; rlcore trains one set of adapters of a model at a time"
            )
        if base_model in self._hosts:
            raise StateError(
                f"{base_model} has the engines of a sampling client, without adapters to train; make the training "
                "client first, and sampling clients after it"
            )
        host = self._host(base_model, rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn)
        client = TrainingClient(host, base_model, rank, self._folder)
        self._clients[base_model] = client
        return _done(client)

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> ClientFuture[SamplingClient]:
        """Return a client that samples from a base model, or from weights of ``save_weights_for_sampler``."""
        if (model_path is None) == (base_model is None):
            raise InvalidInputError("create_sampling_client() takes one of model_path and base_model")
        if base_model is not None:
            base_model = str(base_model)
            host = self._hosts.get(base_model) or self._host(
                base_model, rank=1, seed=None, train_mlp=False, train_attn=True
            )
            return _done(SamplingClient(host, base_model, None))
        owner = self._clients.get(str(model_path).rpartition("/sampler/")[0])
        if owner is None:
            raise InvalidInputError(f"no weights were saved as {model_path!r} by a client of this ServiceClient")
        return _done(owner.create_sampling_client(str(model_path)))

    create_lora_training_client_async = ends(create_lora_training_client)
    create_sampling_client_async = ends(create_sampling_client)

    def close(self) -> None:
        """Close the engines of all clients."""
        self._is_closed = True
        with contextlib.ExitStack() as all_hosts:
            while self._hosts:
                all_hosts.callback(self._hosts.popitem()[1].close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _host(self, base_model: str, **options: Any) -> ModelHost:
        if self._is_closed:
            raise StateError("the ServiceClient is closed; make another")
        path = check_model_folder(Path(base_model)).path
        host = self._hosts[base_model] = ModelHost(
            path,
            lora_module(path, **options),
            self._trainer,
            self._sampler,
            unhealthy_after_s=self._unhealthy_after_s,
        )
        if self._is_closed:  # by another thread, while the engines were built
            if self._hosts.pop(base_model, None):  # else that thread has seen the host, and closes it
                host.close()
            raise StateError("the ServiceClient was closed while the engines were built; make another")
        return host


def _done(client: Any) -> ClientFuture[Any]:
    future: Future[Any] = Future()
    future.set_result(client)
    return ClientFuture(future)
