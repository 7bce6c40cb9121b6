"""SGLang without rlcore, in a process of its own: what the executor ``sglang`` is measured beside."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from rlcore.device import Device
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.engines.sampling.sglang import versions
from rlcore.engines.sampling.sglang.arguments import engine_arguments
from rlcore.errors import BenchError
from rlcore.registry import get_device
from rlcore.weights.source import in_files, on_meta

_CLOSE_S = 30.0
"""How long it may take to end by itself, before it is killed."""


class SglangAlone:
    """An engine with SGLang's own sampler, detokenizer and loader.

    Args:
        device: the engine's.
        source: the device with new weights.
        options: arguments of the engine.

    Raises:
        BenchError: it has failed, or ended.
    """

    def __init__(self, folder: Path, device: str, source: str, options: Mapping[str, Any]) -> None:
        self.way: Literal["tensors", "distributed"] = "tensors" if source == device else "distributed"
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, folder, device, source, options))
        self._process.start()
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, task: str, *arguments: Any) -> tuple[float, Any]:
        """Do a task; return its seconds, and its result.

        "generate" takes prompts and the number of tokens for each, and returns how many came. "update" loads new
        weights as SGLang does: by ``update_weights_from_tensor`` those that are on its device, by
        ``update_weights_from_distributed`` those of another.
        """
        self._connection.send((task, arguments))
        found: tuple[float, Any] = self._answer()
        return found

    def _answer(self) -> Any:
        try:
            failure, found = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self.close()
            raise BenchError(f"SGLang alone has ended with exit code {self._process.exitcode}") from error
        if failure:
            raise BenchError(f"SGLang alone has failed: {failure}")
        return found

    def close(self) -> None:
        """End it; it is killed where it does not end in time."""
        self._connection.close()
        self._process.join(_CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Any, folder: Path, *arguments: Any) -> None:
    """Answer tasks until the other end is closed; an answer is the text of an error, else "", and the result."""
    try:
        _run(connection, folder, *arguments)
    except BaseException as error:
        with contextlib.suppress(OSError):  # nobody may listen any more
            connection.send((f"{type(error).__name__}: {error}", None))
        raise


def _run(connection: Any, folder: Path, device_name: str, source_name: str, options: Mapping[str, Any]) -> None:
    device, source = get_device(device_name), get_device(source_name)
    versions.prepare(device, 1)
    import sglang

    context = WorkerContext("SGLang alone", 0, 1, device.name, 1, (device.name,))
    arguments = engine_arguments(options, check_model_folder(folder), context)
    if not device.spec.is_host:
        del arguments["sampling_backend"], arguments["enable_memory_saver"]
    engine = sglang.Engine(**arguments)
    try:
        named = _new_weights(folder, source.torch_device)
        is_near = source_name == device_name
        send = (lambda: engine.update_weights_from_tensor(named)) if is_near else _Broadcast(engine, named, source)
        tasks: dict[str, Callable[..., Any]] = {
            "generate": lambda prompts, count: _generate(engine, prompts, count),
            "update": lambda: _update(engine, send),
        }
        connection.send(("", None))
        for task, given in _asked(connection):
            device.synchronize()
            source.synchronize()
            started = time.perf_counter()
            found = tasks[task](*given)
            connection.send(("", (time.perf_counter() - started, found)))
    finally:
        engine.shutdown()


def _asked(connection: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield connection.recv()


def _new_weights(folder: Path, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Return random weights: with zeros, as the folder has, tokens would cost another time."""
    weights = on_meta(in_files(check_model_folder(folder).weight_files))
    return [(name, torch.randn_like(meta, device=device).mul_(0.02)) for name, meta in weights.items()]


def _generate(engine: Any, prompts: list[list[int]], count: int) -> int:
    params = {"max_new_tokens": count, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    return sum(len(output["output_ids"]) for output in outputs)


def _update(engine: Any, send: Callable[[], tuple[Any, ...]]) -> None:
    is_in_session = hasattr(engine, "begin_weight_update")  # versions from 0.5.18 on refuse any other
    if is_in_session:
        engine.begin_weight_update()
    done, message = send()[:2]
    if is_in_session:
        engine.end_weight_update()
    if not done:
        raise BenchError(f"SGLang alone took no weights: {message}")


class _Broadcast:
    """Gives weights on another device than the engine's, through a group of two; this process is its rank 0."""

    _NAME = "rlcore_bench"

    def __init__(self, engine: Any, named: list[tuple[str, torch.Tensor]], source: Device) -> None:
        from sglang.srt.utils import init_custom_process_group

        self._engine, self._named, self._source = engine, named, source
        backend = "gloo" if source.spec.is_host else "nccl"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        group: list[Any] = []

        def join() -> None:
            address = f"tcp://127.0.0.1:{port}"
            group.append(
                init_custom_process_group(
                    backend=backend, init_method=address, world_size=2, rank=0, group_name=self._NAME
                )
            )

        done, message = self._beside(
            join, lambda: engine.init_weights_update_group("127.0.0.1", port, 1, 2, self._NAME, backend)
        )
        if not done:
            raise BenchError(f"SGLang alone made no group: {message}")
        self._group = group[0]

    def __call__(self) -> Any:
        names = [name for name, _ in self._named]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in self._named]
        shapes = [list(tensor.shape) for _, tensor in self._named]
        return self._beside(
            self._broadcast, lambda: self._engine.update_weights_from_distributed(names, dtypes, shapes, self._NAME)
        )

    def _broadcast(self) -> None:
        for _, tensor in self._named:
            dist.broadcast(tensor, src=0, group=self._group)
        self._source.synchronize()

    @staticmethod
    def _beside(ours: Callable[[], None], theirs: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Do our part in a thread, as either part waits for the other; ours would wait for ever if SGLang refuses."""
        failures: list[BaseException] = []

        def keeping_failures() -> None:
            try:
                ours()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=keeping_failures, daemon=True)
        thread.start()
        found = theirs()
        if not found[0]:
            return found
        thread.join()
        if failures:
            raise failures[0]
        return found
