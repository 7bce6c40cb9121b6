"""SGLang without rlcore, in a process of its own: what the executor ``sglang`` is measured beside."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

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
    """An engine with SGLang's own sampler, detokenizer and loader; ``options`` are arguments of it.

    Raises:
        BenchError: it has failed, or ended.
    """

    def __init__(self, folder: Path, device: str, options: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, folder, device, options))
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
        weights that are on the device as SGLang does, by ``update_weights_from_tensor``.
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


def _serve(connection: Any, folder: Path, device_name: str, options: Mapping[str, Any]) -> None:
    """Answer tasks until the other end is closed; an answer is the text of an error, else "", and the result."""
    try:
        _run(connection, folder, device_name, options)
    except BaseException as error:
        with contextlib.suppress(OSError):  # nobody may listen any more
            connection.send((f"{type(error).__name__}: {error}", None))
        raise


def _run(connection: Any, folder: Path, device_name: str, options: Mapping[str, Any]) -> None:
    device = get_device(device_name)
    versions.prepare(device, 1)
    import sglang

    context = WorkerContext("SGLang alone", 0, 1, device.name, 1, (device.name,))
    arguments = engine_arguments(options, check_model_folder(folder), context)
    if not device.spec.is_host:
        del arguments["sampling_backend"], arguments["enable_memory_saver"]
    engine = sglang.Engine(**arguments)
    try:
        named = _new_weights(folder, device.torch_device)
        tasks: dict[str, Callable[..., Any]] = {
            "generate": lambda prompts, count: _generate(engine, prompts, count),
            "update": lambda: _update(engine, named),
        }
        connection.send(("", None))
        for task, given in _asked(connection):
            device.synchronize()
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


def _update(engine: Any, named: list[tuple[str, torch.Tensor]]) -> None:
    is_in_session = hasattr(engine, "begin_weight_update")  # versions from 0.5.18 on refuse any other
    if is_in_session:
        engine.begin_weight_update()
    done, message = engine.update_weights_from_tensor(named)[:2]
    if is_in_session:
        engine.end_weight_update()
    if not done:
        raise BenchError(f"SGLang alone took no weights: {message}")
