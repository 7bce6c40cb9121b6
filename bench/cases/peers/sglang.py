"""New weights and tokens of the executor ``sglang``, and of SGLang alone on the same device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from rlcore.bench import steps
from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_7B, QWEN_30B_A3B, ModelShape
from rlcore.bench.cases.peers.sglang_alone import SglangAlone
from rlcore.bench.cases.peers.vllm_pair import TIMEOUT_S, EnginePair
from rlcore.bench.cases.timing import Measured, self_timed, timed
from rlcore.device import Device
from rlcore.engines.weight_sync.transports.base import Route
from rlcore.errors import MissingDependencyError, UnsupportedError
from rlcore.types import SyncReport

_NUM_RUNS = 5
_PROMPT, _PROMPTS, _TOKENS = 32, 256, 128
_PROMPTS_ON_HOST, _TOKENS_ON_HOST = 8, 16


class _Workload:
    """The prompts that both samplers are given, and what is expected of either."""

    def __init__(self, pair: EnginePair) -> None:
        is_host = pair.device.spec.is_host
        shape = (_PROMPTS_ON_HOST if is_host else _PROMPTS, _PROMPT)
        self.prompts = torch.randint(pair.vocabulary, shape, generator=torch.Generator().manual_seed(0)).tolist()
        self.count = _TOKENS_ON_HOST if is_host else _TOKENS

    @staticmethod
    def rate(count: int, seconds: float) -> Measured:
        return Measured(count, seconds, {"tokens_per_s": Quantity(count / seconds, "token/s")})

    def check(self, count: int) -> None:
        expect(count == len(self.prompts) * self.count, f"{count} tokens came")


class _Rlcore:
    """The tasks of rlcore that are timed; each leaves the sampler with all that it needs."""

    def __init__(self, pair: EnginePair, workload: _Workload) -> None:
        self._pair, self._workload = pair, workload
        self._sums: dict[int, Any] = {}

    def contenders(self, *routes: Route) -> list[Contender]:
        syncs = (
            self_timed(route or "sync", functools.partial(self._sync, route), self._check_sync)
            for route in (None, *routes)
        )
        return [*syncs, self_timed("tokens", self._tokens, self._workload.check)]

    def _sync(self, route: Route | None) -> Measured:
        self._pair.step()
        report, seconds = timed(lambda: self._pair.train.sync_weights(self._pair.infer, route=route), self._pair.device)
        return Measured(report, seconds, {name: Quantity(one, "s") for name, one in self._pair.first.items()})

    def _check_sync(self, report: SyncReport) -> None:
        sums = self._pair.ask_each("sync_call", "sums", None)
        expect(self._sums.setdefault(self._pair.state, sums) == sums, "SGLang has other weights than a round before")
        expect(self._sums.get(0) != self._sums.get(1), "the weights of two steps are the same")
        expect(report.fallback_bytes == 0, f"{report.fallback_bytes} bytes went through SGLang's own loader")

    def _tokens(self) -> Measured:
        params = {"max_tokens": self._workload.count, "ignore_eos": True}
        outputs, seconds = timed(lambda: self._pair.infer.generate(self._workload.prompts, params), self._pair.device)
        return self._workload.rate(sum(len(output.outputs[0].token_ids) for output in outputs), seconds)


def _contenders_alone(alone: SglangAlone, workload: _Workload) -> list[Contender]:
    def update() -> Measured:
        seconds, _ = alone.ask("update")
        return Measured(None, seconds)

    def tokens() -> Measured:
        seconds, count = alone.ask("generate", workload.prompts, workload.count)
        return workload.rate(count, seconds)

    return [
        self_timed(f"sglang_{alone.way}", update, lambda _: None),
        self_timed("sglang_tokens", tokens, workload.check),
    ]


def _check_installed() -> str:
    """Return SGLang's version. Raises MissingDependencyError without it."""
    try:
        import sglang
    except ImportError as error:
        raise MissingDependencyError("sglang", needed_for="this case", extra="sglang") from error
    version: str = sglang.__version__
    return version


def _source_of(device: Device, steps_on: int) -> str:
    """Return the name of the device with the new weights. Raises UnsupportedError without it."""
    if not steps_on:
        return device.name
    index = device.index + steps_on
    if index >= device.count():
        raise UnsupportedError(f"this case on {device.name}", f"it takes {device.spec.name}:{index} too")
    return f"{device.spec.name}:{index}"


def _options(device: Device) -> dict[str, Any]:
    """Return the arguments of either sampler."""
    options: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 1 << 16, "context_length": 1024}
    options["load_format"] = "auto" if device.spec.is_host else "dummy"
    if not device.spec.is_host:
        options["attention_backend"] = "triton"  # every installation has it
    return options


def _prepare_rlcore(pair: EnginePair, source: str, closes: ExitStack) -> list[Contender]:
    steps.begin("build of the sampler")
    pair.infer.build(devices=pair.device.name, timeout_s=TIMEOUT_S, **_options(pair.device))
    steps.begin("build of the trainer")
    pair.train.build(devices=source, dtype="bfloat16", timeout_s=TIMEOUT_S)
    pair.sync_first()
    return _Rlcore(pair, _Workload(pair)).contenders("packed" if source == pair.device.name else "collective")


def _prepare_alone(pair: EnginePair, source: str, closes: ExitStack) -> list[Contender]:
    steps.begin("build of SGLang alone")
    alone = SglangAlone(pair.folder, pair.device.name, source, _options(pair.device))
    closes.callback(alone.close)
    return _contenders_alone(alone, _Workload(pair))


def _prepare(model: ModelShape, steps_on: int, prepare: Callable[..., list[Contender]], device: Device) -> Work:
    version, source_name = _check_installed(), _source_of(device, steps_on)
    pair = EnginePair(model, device, "sglang")
    with ExitStack() as closes:
        closes.callback(pair.close)
        contenders = prepare(pair, source_name, closes)
        return Work(
            tuple(contenders),
            {"model": pair.name, "bytes": pair.nbytes, "names": pair.num_names, "sglang": version},
            num_runs=_NUM_RUNS,
            close=closes.pop_all().close,
        )


def _both(name: str, model: ModelShape, about: str = "", steps_on: int = 0) -> tuple[Case, Case]:
    """Return the case of rlcore and that of SGLang alone: a device has memory for one of them at once, and a run that
    is cut short has what was first.

    Args:
        steps_on: how many devices after the samplers' the one with the new weights is.
    """
    what = f"new weights and tokens of real SGLang, {model.name} shapes (tiny on a host){about}"
    return (
        Case(
            f"weight_sync/sglang/{name}",
            f"{what}, by rlcore",
            functools.partial(_prepare, model, steps_on, _prepare_rlcore),
            effort="full",
            estimate_s=180.0,
        ),
        Case(
            f"weight_sync/sglang/{name}_alone",
            f"{what}, by SGLang alone",
            functools.partial(_prepare, model, steps_on, _prepare_alone),
            effort="full",
            estimate_s=90.0,
        ),
    )


cases = (
    *_both("7b", QWEN_7B),
    *_both("7b_1_to_1", QWEN_7B, ", from the next device", steps_on=1),
    *_both("30b_a3b", QWEN_30B_A3B),
)
