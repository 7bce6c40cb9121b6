"""``RemoteInfEngine``: AReaLite's client of inference servers, over a ``RolloutController``; and its weight update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import Any

import rlcore
from rlcore.arguments import COUNT, ITERABLE, WHOLE, Kind, kind_of, takes
from rlcore.compat.areal.batches import TensorBatch, batch_of, trajectories_of
from rlcore.compat.areal.configuration import FinetuneSpec, InferenceEngineConfig
from rlcore.compat.areal.workflow import EpisodeEngine, RolloutWorkflow
from rlcore.errors import InvalidInputError, RolloutError, RolloutTimeoutError, StateError, UnsupportedError
from rlcore.rollout import Episode, RolloutClient, RolloutController, Trajectory, Workflow
from rlcore.types import SyncReport


@dataclass
class WeightUpdateMeta:
    """One way of a weight update: here always ``sync_weights``, by the best route.

    AReaLite's "disk" and "nccl" (newer: "xccl") lead to the same weights; which route was taken is in ``report``.
    """

    type: str
    report: SyncReport | None = None
    waiting: list[tuple[RemoteInfEngine, Future[None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.type not in ("disk", "nccl", "xccl"):
            raise UnsupportedError(f"WeightUpdateMeta(type={self.type!r})", "'disk', 'nccl' and 'xccl' are")

    @classmethod
    def from_disk(cls, *_: Any, **__: Any) -> WeightUpdateMeta:
        return cls("disk")

    @classmethod
    def from_fsdp_nccl(cls, *_: Any, **__: Any) -> WeightUpdateMeta:
        return cls("nccl")

    @classmethod
    def from_fsdp_xccl(cls, *_: Any, **__: Any) -> WeightUpdateMeta:
        return cls("xccl")


_WORKFLOW = Kind(
    "a RolloutWorkflow (an instance, with arun_episode)",
    lambda value: hasattr(value, "arun_episode") and not isinstance(value, type),
)
META = kind_of("a WeightUpdateMeta", WeightUpdateMeta)


class _AnyWorkflow(Workflow):
    """Runs the workflow that comes with each item."""

    async def run_episode(self, client: RolloutClient, data: Any) -> list[Trajectory] | None:
        item, workflow = data
        found = await workflow.arun_episode(EpisodeEngine(client), item)
        return None if found is None else trajectories_of(found)


@dataclass
class _Server:
    """The engine that the clients of one model share."""

    config: InferenceEngineConfig
    """A copy of the first client's."""
    engine: rlcore.InferenceEngine
    controller: RolloutController
    num_clients: int = 0


_FAR = 10**6
"""A version, or a bound of staleness, that is so far ahead is that of a client for evaluation."""


def _is_for_evaluation(config: InferenceEngineConfig, first: InferenceEngineConfig) -> bool:
    return config.max_head_offpolicyness > first.max_head_offpolicyness + _FAR


def _check_same(config: InferenceEngineConfig, first: InferenceEngineConfig) -> None:
    if _is_for_evaluation(config, first):
        first = replace(first, max_head_offpolicyness=config.max_head_offpolicyness)
    for name in (one.name for one in fields(InferenceEngineConfig) if one.name != "model_path"):
        own, other = getattr(config, name), getattr(first, name)
        if own != other:
            raise InvalidInputError(
                f"this client of {first.model_path} has {name}={own!r}, and the client whose engine it would share "
                f"{name}={other!r}; give both the same, or destroy() that one first. Of a client for evaluation "
                "set_version(10**12) lifts the bounds"
            )


class RemoteInfEngine:
    """AReaLite's client of inference servers, ``RemoteSGLangEngine`` in its programs."""

    _servers: dict[str, _Server] = {}  # noqa: RUF012 (shared by all clients on purpose)

    @takes("RemoteInfEngine", config=kind_of("an InferenceEngineConfig", InferenceEngineConfig))
    def __init__(self, config: InferenceEngineConfig) -> None:
        self.config = config
        self._eval_version: int | None = None
        self._eval_items: list[tuple[Any, RolloutWorkflow]] = []
        self._loader: _Paired | None = None
        self._server: _Server | None = None

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Build the inference engine of ``config.model_path``, or share that of an earlier client.

        Raises:
            InvalidInputError: the configuration is another one than that of the client that it would share with.
        """
        if addr is not None:
            raise UnsupportedError(f"initialize(addr={addr!r})", "the engine is built here; there is no server")
        if self._server is not None:
            return
        key = str(self.config.model_path)
        if key not in self._servers:
            with contextlib.ExitStack() as undone:
                engine = undone.enter_context(rlcore.InferenceEngine(key, executor=self.config.executor))
                controller = RolloutController(
                    engine.build(**self.config.options),
                    _AnyWorkflow(),
                    batch_size=self.config.consumer_batch_size,
                    max_staleness=self.config.max_head_offpolicyness,
                    max_concurrent=self.config.max_concurrent_rollouts,
                    episode_timeout_s=self.config.request_timeout,
                )
                undone.pop_all()
            kept = replace(self.config, options={**self.config.options})  # its options may have engines
            self._servers[key] = _Server(kept, engine, controller)
        server = self._servers[key]
        _check_same(self.config, server.config)
        if _is_for_evaluation(self.config, server.config):
            self._eval_version = self.config.max_head_offpolicyness
        self._server = server
        server.num_clients += 1

    def destroy(self) -> None:
        """Leave the engine; the last client closes it."""
        server, self._server = self._server, None
        if server is None:
            return
        server.num_clients -= 1
        if not server.num_clients:
            del self._servers[str(server.config.model_path)]
            try:
                server.controller.close()
            finally:
                server.engine.close()

    @property
    def controller(self) -> RolloutController:
        """The ``RolloutController`` behind it."""
        if self._server is None:
            raise StateError("the rollout engine is not initialized; call initialize(None, ft_spec)")
        return self._server.controller

    @takes("set_version()", version=WHOLE)
    def set_version(self, version: int) -> None:
        """Tell the version of the weights. One that is far ahead makes a client for evaluation, as in AReaLite."""
        if version > self.controller.version + _FAR:
            self._eval_version = version
        else:
            self.controller.set_version(version)

    def get_version(self) -> int:
        return self.controller.version if self._eval_version is None else self._eval_version

    @takes("submit()", workflow=_WORKFLOW)
    def submit(self, data: Any, workflow: RolloutWorkflow) -> None:
        """Queue an episode."""
        if self._eval_version is not None:
            self._eval_items.append((data, workflow))
        else:
            self.controller.submit((data, workflow))

    @takes("wait()", count=COUNT)
    def wait(self, count: int, timeout: float | None = None) -> TensorBatch:
        """Return a batch of ``count`` episodes; those that failed are left out by a client for evaluation."""
        if self._eval_version is not None:
            return batch_of(self._evaluate(count, timeout))
        return batch_of(self.controller.wait(count, timeout))

    def _evaluate(self, count: int, timeout_s: float | None) -> list[Episode]:
        items = self._eval_items[:count]
        if len(items) < count:
            raise StateError(
                f"wait({count}) would wait for ever: only {len(items)} episodes were submitted; submit() more"
            )
        try:
            episodes = self.controller.evaluate(items, timeout_s=timeout_s)
        except RolloutError as error:
            if not isinstance(error, RolloutTimeoutError) and self.controller.num_healthy:
                del self._eval_items[:count]  # they have failed by themselves: again they would stop those after them
            raise
        del self._eval_items[:count]  # not earlier: after a timeout or an interruption they can be waited for again
        return episodes

    @takes("rollout_batch()", data=ITERABLE, workflow=_WORKFLOW)
    def rollout_batch(self, data: Sequence[Any], workflow: RolloutWorkflow) -> TensorBatch:
        """Run an episode for each item now, and return their batch."""
        return batch_of(self.controller.rollout_episodes([(item, workflow) for item in data]))

    @takes("prepare_batch()", dataloader=ITERABLE, workflow=_WORKFLOW)
    def prepare_batch(self, dataloader: Iterable[Any], workflow: RolloutWorkflow) -> TensorBatch:
        """Return the next batch of the asynchronous training. As in AReaLite, the first call's arguments are kept."""
        if self._loader is None:
            self._loader = _Paired(dataloader, workflow)
        return batch_of(self.controller.prepare_episodes(self._loader))

    @takes("update_weights()", meta=META)
    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Begin to wait for the weights that ``actor.upload_weights(meta)`` sends."""
        future: Future[None] = Future()
        meta.waiting.append((self, future))
        return future

    def pause(self) -> None:
        """Begin no more episodes."""
        self.controller.pause()

    def resume(self) -> None:
        self.controller.resume()


RemoteSGLangEngine = RemotevLLMEngine = RemoteInfEngine


class _Paired:
    """A dataloader whose items come with their workflow."""

    def __init__(self, dataloader: Iterable[Any], workflow: RolloutWorkflow) -> None:
        self._dataloader, self._workflow = dataloader, workflow

    def __iter__(self) -> Iterator[list[tuple[Any, RolloutWorkflow]]]:
        for items in self._dataloader:
            if not ITERABLE.has(items):
                raise InvalidInputError(
                    f"the dataloader of prepare_batch() must give lists of items, got {items!r:.200}; give it "
                    "collate_fn=list"
                )
            yield [(item, self._workflow) for item in items]
