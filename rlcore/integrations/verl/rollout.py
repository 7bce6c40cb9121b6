"""verl's rollout in vLLM, whose weights come by rlcore's plan: from the trainer's shards, without gathered tensors.

With VERL_ENGINE_VENDOR=rlcore and strategy fsdp2, one more setting of verl turns it on:
``rollout.engine_kwargs.vllm.weight_transfer_config.backend=rlcore_ipc``. Without it verl's own sync goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

import rlcore
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.errors import InvalidInputError, SyncError, UnsupportedError
from rlcore.integrations.verl.engine import EngineWeights
from rlcore.process.runtime_folder import runtime_folder

BACKEND = "rlcore_ipc"
_TIMEOUT_S = 120.0
"""The longest that vLLM's workers may take to connect, and that a sync may take."""


class PlannedServerAdapter(ServerAdapter):  # type: ignore[misc]
    """The rollout of one trainer rank. All ranks call each method together; the first of a replica calls its vLLM."""

    _sender: rlcore.WeightSender | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        chosen = (self.config.engine_kwargs.get("vllm") or {}).get("weight_transfer_config") or {}
        self._is_planned = chosen.get("backend") == BACKEND

    async def update_weights(self, weights: Any, global_steps: int | None = None, **options: Any) -> None:
        """Give vLLM the trainer's weights; adapters alone, and all without the setting, go by verl's own sync.

        Raises:
            InvalidInputError: these weights are not those of rlcore's engine.
            SyncError: what went wrong, on all ranks, and whether vLLM's weights are whole.
        """
        if not self._is_planned or options.get("peft_config") is not None:
            await super().update_weights(weights, global_steps=global_steps, **options)
            return
        if not isinstance(weights, EngineWeights):
            raise InvalidInputError(
                f"{BACKEND} takes the weights of rlcore's engine where they are, got {type(weights).__name__}; set "
                "VERL_ENGINE_VENDOR=rlcore with strategy fsdp2, without QAT and offload_policy, or leave "
                "weight_transfer_config out"
            )
        with weights.in_place(self._let_go) as module:
            if self._sender is None:
                _check_layout(self.config)
                self._sender = rlcore.WeightSender(module, await self._controls())
            await self._send(self._sender)
        if self._has_server:
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)

    def _let_go(self) -> None:
        if self._sender is not None:
            self._sender.revoke()

    async def _controls(self) -> list[ControlSocket]:
        """Return the channels to the vLLM workers of all replicas, on rank 0; [] on the others.

        Raises:
            SyncError: on all ranks, if a worker does not connect.
        """
        with _address() as address:
            told = {"address": address, "timeout_s": _TIMEOUT_S}
            asked = self._asked("init_weight_transfer_engine", init_info=told)

            def are_coming() -> bool:
                return not asked.done() or asked.exception() is None

            async def accept() -> list[ControlSocket]:
                if dist.get_rank():
                    return []
                number = dist.get_world_size()  # a replica has as many workers as trainer ranks
                return await asyncio.to_thread(
                    rlcore.accept_controls, address, number, _TIMEOUT_S, are_coming=are_coming
                )

            outcomes: list[Any] = list(await asyncio.gather(asked, accept(), return_exceptions=True))
            _raise_together([one for one in outcomes if isinstance(one, BaseException)])
        controls: list[ControlSocket] = outcomes[1]
        return controls

    async def _send(self, sender: rlcore.WeightSender) -> None:
        await self._asked("start_weight_update")
        asked = self._asked("update_weights", update_info={"timeout_s": _TIMEOUT_S})
        await asyncio.sleep(0)  # the call leaves before send() keeps this thread
        try:
            sender.send(timeout_s=_TIMEOUT_S)
        except SyncError as error:
            outcomes: list[Any] = list(await asyncio.gather(asked, return_exceptions=True))
            raise error from outcomes[0]
        await asked
        await self._asked("finish_weight_update")

    def _asked(self, method: str, **arguments: Any) -> asyncio.Future[Any]:
        """Call a method of this replica's vLLM workers, on the rank that has its server; elsewhere nothing."""

        async def ask() -> None:
            answer = await self._execute_method(method, non_block=True, kwargs=arguments)
            if answer is not None:
                await answer

        return asyncio.ensure_future(ask())


def _check_layout(config: Any) -> None:
    """Raise UnsupportedError where a replica has workers that its server does not call, or that are elsewhere."""
    if config.data_parallel_size > 1 or getattr(getattr(config, "disaggregation", None), "enabled", False):
        raise UnsupportedError(
            f"verl's rollout with {BACKEND} and data_parallel_size > 1 or disaggregation",
            "its server calls one shard's workers; leave weight_transfer_config out",
        )
    if int(os.environ["RAY_LOCAL_WORLD_SIZE"]) < dist.get_world_size():
        raise UnsupportedError(
            f"verl's rollout with {BACKEND} over several machines",
            "a sampler on a trainer's device cannot be given the rows of another machine; leave "
            "weight_transfer_config out",
        )


@contextlib.contextmanager
def _address() -> Iterator[str]:
    """Give one address of this machine to all ranks."""
    with runtime_folder() as folder:
        told = [str(Path(folder.path) / f"verl-{uuid.uuid4().hex[:8]}")]
    dist.broadcast_object_list(told)
    yield told[0]


def _raise_together(errors: list[BaseException]) -> None:
    """Raise, on all ranks, if there is an error on any of them, so that none waits for another."""
    said: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(said, [f"{type(error).__name__}: {error}" for error in errors])
    every = [text for texts in said for text in texts]
    if every:
        raise SyncError(f"vLLM's workers did not connect: {'; '.join(every)}") from next(iter(errors), None)
