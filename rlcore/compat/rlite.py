"""RLite's interface over rlcore's engines: a program needs only ``from rlcore.compat import rlite``.

In RLite "cuda" means the engine's own device. Here it does too, also in the methods of a module. Workers run on this
host: there is no Ray cluster to join.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import torch
from torch.overrides import TorchFunctionMode

import rlcore
from rlcore.arguments import COUNT, Kind, optional, takes
from rlcore.engines.inference import InferenceEngine
from rlcore.engines.need_parallel import NeedParallel
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.prompts import ParamsLike
from rlcore.engines.train import TrainEngine
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.meta import meta_device
from rlcore.nn import HuggingFaceTrainModule, TrainModule

__all__ = [
    "IndexedGenerationHistory",
    "NeedParallel",
    "RliteInferenceEngine",
    "RliteTrainEngine",
    "device",
    "init",
    "nn",
]


def init(
    network_interface: str = "eth0",
    dedup_logs: bool = False,
    debug_mode: Literal["debugpy", "pdb"] | None = None,
    debug_post_mortem: bool = False,
) -> None:
    """Call ``rlcore.init``. The interface is ignored, because nothing leaves this host; logs are never repeated.

    Raises:
        UnsupportedError: a debugger other than pdb.
    """
    if debug_mode == "debugpy" or debug_post_mortem:
        raise UnsupportedError("init(debug_mode='debugpy') and debug_post_mortem", "use debug_mode='pdb'")
    rlcore.init(debug=debug_mode)


def device(tag: str | torch.device) -> AbstractContextManager[Any]:
    """Return a context: for "meta", modules made inside have no weights; else ``torch.device``."""
    if str(tag) == "meta":
        return meta_device()
    try:
        return contextlib.nullcontext(torch.device(tag))
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"device() takes a device of torch, such as 'cuda' or 'meta', got {tag!r}") from error


# ------------------------------------------------------------------------------------------------------ modules


class _OnOwnDevice(TorchFunctionMode):
    """Replaces "cuda" in calls by the worker's device."""

    def __init__(self, own: torch.device) -> None:
        super().__init__()
        self._own = own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self._own)
        if func is torch.device:  # with an index beside the name, too
            return self._own_if_cuda(func(*args, **(kwargs or {})))
        named = {name: self._own_if_cuda(value) for name, value in (kwargs or {}).items()}
        return func(*(self._own_if_cuda(value) for value in args), **named)

    def _own_if_cuda(self, value: Any) -> Any:
        is_named = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
        return self._own if is_named else value


def _on_own_device(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _OnOwnDevice(next(self.parameters()).device):
            return method(self, *args, **kwargs)

    return call


class _OwnDeviceMethods:
    """Base of user classes whose methods run on the engine's device, also where they name it "cuda"."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member) and not name.startswith("__"):
                setattr(cls, name, _on_own_device(member))


class nn:  # noqa: N801 - the name of RLite's module
    """The namespace ``rlite.nn``."""

    class BaseTrainModule(_OwnDeviceMethods, TrainModule):
        """Any module."""

    class HuggingFaceFsdp2TrainModule(_OwnDeviceMethods, HuggingFaceTrainModule):
        """A transformers model."""

    Fsdp2TrainModule = BaseTrainModule
    BaseHuggingFaceTrainModule = HuggingFaceFsdpTrainModule = HuggingFaceFsdp2TrainModule


# ------------------------------------------------------------------------------------------------------ engines


def _check_placement(pipeline_parallel_size: int, allow_colocate: bool) -> None:
    if pipeline_parallel_size != 1:
        raise UnsupportedError(
            f"build(pipeline_parallel_size={pipeline_parallel_size!r})",
            "engines have no stages, only 1 is accepted; use tensor_parallel_size",
        )
    if allow_colocate is not True:
        raise UnsupportedError(
            f"build(allow_colocate={allow_colocate!r})",
            "only True is accepted; name the engines to keep away from with not_colocate_with",
        )


class RliteTrainEngine(TrainEngine):
    """A train engine whose calls return a list for each replica, with a result for each of its shards."""

    def build(
        self,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = -1,
        allow_colocate: bool = True,
        **options: Any,
    ) -> Self:
        """Build the engine, sharded over ``tensor_parallel_size`` devices.

        Args:
            data_parallel_size: number of replicas of the shards; -1 means one.

        Raises:
            UnsupportedError: another ``pipeline_parallel_size`` or ``allow_colocate`` than the default.
        """
        _check_placement(pipeline_parallel_size, allow_colocate)
        if not COUNT.has(tensor_parallel_size):
            raise InvalidInputError(f"tensor_parallel_size must be {COUNT.words}, got {tensor_parallel_size!r}")
        if data_parallel_size != -1 and not COUNT.has(data_parallel_size):
            raise InvalidInputError(f"data_parallel_size must be {COUNT.words}, or -1, got {data_parallel_size!r}")
        self._num_shards = tensor_parallel_size
        replicas = 1 if data_parallel_size == -1 else data_parallel_size
        return super().build(data_parallel_size=tensor_parallel_size, replicas=replicas, **options)

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        method = super().__getattr__(name)

        def call(*args: Any, **kwargs: Any) -> list[Any]:
            results = method(*args, **kwargs)
            size = self._num_shards
            return [results[at : at + size] for at in range(0, len(results), size)]

        return call


@dataclass
class IndexedGenerationHistory:
    """One prompt with its inputs and outputs, turn by turn."""

    index: int
    inputs: list[str] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)


class _Queue(Protocol):
    def put(self, item: IndexedGenerationHistory) -> None: ...


PostGenerationHook = Callable[[IndexedGenerationHistory, _Queue, _Queue], None]


@dataclass
class _HistoryQueue:
    """A queue on which a hook puts a history."""

    items: list[IndexedGenerationHistory] = field(default_factory=list)

    def put(self, item: IndexedGenerationHistory) -> None:
        self.items.append(item)


_PROMPTS = Kind(
    "a list of texts, or NeedParallel of one,",
    lambda value: isinstance(value, NeedParallel | Iterable) and not isinstance(value, str | bytes | Mapping),
)


class RliteInferenceEngine(InferenceEngine):
    """An inference engine of a model folder; the executor is "vllm" if it is not named."""

    def __init__(self, module_or_path: Any, executor: str = "vllm") -> None:
        super().__init__(module_or_path, executor=executor)

    def build(
        self,
        *,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = -1,
        allow_colocate: bool = True,
        **options: Any,
    ) -> Self:
        """Call ``InferenceEngine.build``; without a number there are as many replicas as the devices hold.

        Raises:
            UnsupportedError: another ``pipeline_parallel_size`` or ``allow_colocate`` than the default.
        """
        _check_placement(pipeline_parallel_size, allow_colocate)
        return super().build(data_parallel_size=data_parallel_size, **options)

    @takes("generate()", prompts=_PROMPTS, post_generation_hook=optional(Kind("a function", callable)))
    def generate(  # type: ignore[override]
        self,
        prompts: Sequence[str] | NeedParallel,
        sampling_params: ParamsLike = None,
        *,
        post_generation_hook: PostGenerationHook | None = None,
        use_tqdm: bool = True,
        tqdm_desc: str = "Processed prompts",
    ) -> list[Any]:
        """Complete each prompt.

        Args:
            post_generation_hook: called after each turn with a history, an input queue and an output queue. It puts
                the history with one more input on the first for another turn, or on the second to end it.

        Returns:
            One output for each prompt; with a hook, a list of outputs for each prompt, one for each turn.
        """
        texts = list(prompts.data if isinstance(prompts, NeedParallel) else prompts)
        if post_generation_hook is None:
            return super().generate(texts, sampling_params, progress=None if use_tqdm else False)
        histories = [IndexedGenerationHistory(index, [text]) for index, text in enumerate(texts)]

        def next_prompt(index: int, turns: list[RequestOutput]) -> str | None:
            again, done = _HistoryQueue(), _HistoryQueue()
            histories[index].outputs.append(turns[-1])
            post_generation_hook(histories[index], again, done)
            if len(again.items) + len(done.items) != 1:
                raise InvalidInputError(
                    f"the post_generation_hook put history {index} on {len(again.items)} input and {len(done.items)} "
                    "output queues; put it on one"
                )
            (histories[index],) = again.items or done.items
            chosen = histories[index]
            if not isinstance(chosen, IndexedGenerationHistory) or (again.items and not chosen.inputs):
                raise InvalidInputError(
                    f"the post_generation_hook must put a history with inputs on a queue, got {chosen!r:.100}"
                )
            return chosen.inputs[-1] if again.items else None

        self.generate_turns(texts, next_prompt, sampling_params)
        return [history.outputs for history in histories]
