"""New weights and tokens of the executor ``sglang``, beside SGLang alone on the same device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Sides(NamedTuple):
    """The sides of a case, and where they are; the samplers are on the first device."""

    rlcore: bool = True
    alone: bool = True
    """SGLang alone. With both there are four copies of the weights."""
    source: int = 0
    """The index of the device with the new weights."""


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
        return Measured(report, seconds, {"first_sync": Quantity(self._pair.first_s, "s")})

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


def _source(sides: Sides, device: Device) -> str:
    """Return the name of the device with the new weights."""
    if sides.source >= max(1, device.count()):
        raise UnsupportedError(f"this case on {device.spec.name}", f"it takes {sides.source + 1} devices")
    return f"{device.spec.name}:{sides.source}"


def _prepare(model: ModelShape, sides: Sides, device: Device) -> Work:
    try:
        import sglang
    except ImportError as error:
        raise MissingDependencyError("sglang", needed_for="this case", extra="sglang") from error
    source = _source(sides, device)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 1 << 16, "context_length": 1024}
    options["load_format"] = "auto" if device.spec.is_host else "dummy"
    if not device.spec.is_host:
        options["attention_backend"] = "triton"  # every installation has it
    pair = EnginePair(model, device, "sglang")
    workload = _Workload(pair)
    closes: list[Callable[[], None]] = [pair.close]
    contenders: list[Contender] = []

    def close() -> None:
        for one in reversed(closes):
            one()

    try:
        if sides.rlcore:
            steps.begin("build of the engine")
            pair.infer.build(devices=device.name, timeout_s=TIMEOUT_S, **options)
            pair.train.build(devices=source, dtype="bfloat16", timeout_s=TIMEOUT_S)
            pair.sync_first()
            contenders += _Rlcore(pair, workload).contenders("collective" if sides.source else "packed")
        if sides.alone:
            steps.begin("build of SGLang alone")
            alone = SglangAlone(pair.folder, device.name, source, options)
            closes.append(alone.close)
            contenders += _contenders_alone(alone, workload)
    except BaseException:
        close()
        raise
    return Work(
        tuple(contenders),
        {"model": pair.name, "bytes": pair.nbytes, "names": pair.num_names, "sglang": sglang.__version__},
        num_runs=_NUM_RUNS,
        close=close,
    )


def _case(name: str, model: ModelShape, sides: Sides, about: str, estimate_s: float) -> Case:
    return Case(
        f"weight_sync/sglang/{name}",
        f"new weights and tokens of real SGLang, {model.name} shapes (tiny on a host), {about}",
        functools.partial(_prepare, model, sides),
        effort="full",
        estimate_s=estimate_s,
    )


cases = (
    _case("7b", QWEN_7B, Sides(), "beside SGLang alone", 180.0),
    _case("7b_1_to_1", QWEN_7B, Sides(source=1), "from the next device, beside SGLang alone", 180.0),
    # Four copies of a 30B are on no device at once.
    _case("30b_a3b", QWEN_30B_A3B, Sides(alone=False), "by rlcore", 240.0),
    _case("30b_a3b_alone", QWEN_30B_A3B, Sides(rlcore=False), "by SGLang alone", 180.0),
)
