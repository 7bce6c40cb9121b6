"""SGLang without rlcore, in a process of its own: what the executor ``sglang`` is measured beside."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
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


class SglangAlone:
    """An engine with SGLang's own sampler, detokenizer and loader; ``options`` are arguments of it.

    Raises:
        BenchError: it has ended.
    """

    def __init__(self, folder: Path, device: str, options: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, folder, device, options))
        self._process.start()
        theirs.close()
        self._answer()

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
            return self._connection.recv()
        except EOFError as error:
            self._process.join()
            raise BenchError(f"SGLang alone has ended with exit code {self._process.exitcode}") from error

    def close(self) -> None:
        self._connection.close()
        self._process.join()


def _serve(connection: Any, folder: Path, device_name: str, options: Mapping[str, Any]) -> None:
    device = get_device(device_name)
    versions.prepare(device, 1)
    import sglang

    context = WorkerContext("SGLang alone", 0, 1, device.name, 1, (device.name,))
    arguments = engine_arguments(options, check_model_folder(folder), context)
    if not device.spec.is_host:
        del arguments["sampling_backend"], arguments["enable_memory_saver"]
    engine = sglang.Engine(**arguments)
    weights = on_meta(in_files(check_model_folder(folder).weight_files))
    named = [(name, torch.zeros_like(meta, device=device.torch_device)) for name, meta in weights.items()]
    tasks: dict[str, Callable[..., Any]] = {
        "generate": lambda prompts, count: _generate(engine, prompts, count),
        "update": lambda: _update(engine, named),
    }
    connection.send(None)
    try:
        while True:
            task, given = connection.recv()
            device.synchronize()
            started = time.perf_counter()
            found = tasks[task](*given)
            connection.send((time.perf_counter() - started, found))
    except EOFError:
        engine.shutdown()


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
