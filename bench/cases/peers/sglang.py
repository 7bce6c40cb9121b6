"""New weights and tokens of the executor ``sglang``, beside SGLang alone on the same device."""

from __future__ import annotations

import functools
from typing import Any

import torch

from rlcore.bench import steps
from rlcore.bench.case import Case, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_7B, ModelShape
from rlcore.bench.cases.peers.sglang_alone import SglangAlone
from rlcore.bench.cases.peers.vllm_pair import TIMEOUT_S, EnginePair
from rlcore.bench.cases.timing import Measured, self_timed, timed
from rlcore.device import Device
from rlcore.engines.weight_sync.transports.base import Route
from rlcore.errors import MissingDependencyError
from rlcore.types import SyncReport

_NUM_RUNS = 5
_PROMPT, _PROMPTS, _TOKENS = 32, 256, 128
_PROMPTS_ON_HOST, _TOKENS_ON_HOST = 8, 16


class _BesideSglang:
    """The tasks that are timed; each leaves both samplers with all that they need."""

    def __init__(self, pair: EnginePair, alone: SglangAlone) -> None:
        self._pair, self._alone = pair, alone
        is_host = pair.device.spec.is_host
        shape = (_PROMPTS_ON_HOST if is_host else _PROMPTS, _PROMPT)
        self._prompts = torch.randint(pair.vocabulary, shape, generator=torch.Generator().manual_seed(0)).tolist()
        self._count = _TOKENS_ON_HOST if is_host else _TOKENS
        self._sums: dict[int, Any] = {}

    def sync(self, route: Route | None) -> Measured:
        self._pair.step()
        report, seconds = timed(lambda: self._pair.train.sync_weights(self._pair.infer, route=route), self._pair.device)
        return Measured(report, seconds, {"first_sync": Quantity(self._pair.first_s, "s")})

    def check_sync(self, report: SyncReport) -> None:
        sums = self._pair.ask_each("sync_call", "sums", None)
        expect(self._sums.setdefault(self._pair.state, sums) == sums, "SGLang has other weights than a round before")
        expect(self._sums.get(0) != self._sums.get(1), "the weights of two steps are the same")
        expect(report.fallback_bytes == 0, f"{report.fallback_bytes} bytes went through SGLang's own loader")

    def own_update(self) -> Measured:
        seconds, _ = self._alone.ask("update")
        return Measured(None, seconds)

    def tokens(self) -> Measured:
        params = {"max_tokens": self._count, "ignore_eos": True}
        outputs, seconds = timed(lambda: self._pair.infer.generate(self._prompts, params), self._pair.device)
        return self._rate(sum(len(output.outputs[0].token_ids) for output in outputs), seconds)

    def own_tokens(self) -> Measured:
        seconds, count = self._alone.ask("generate", self._prompts, self._count)
        return self._rate(count, seconds)

    def _rate(self, count: int, seconds: float) -> Measured:
        return Measured(count, seconds, {"tokens_per_s": Quantity(count / seconds, "token/s")})

    def check_tokens(self, count: int) -> None:
        expect(count == len(self._prompts) * self._count, f"{count} tokens came")


def _prepare(model: ModelShape, device: Device) -> Work:
    try:
        import sglang
    except ImportError as error:
        raise MissingDependencyError("sglang", needed_for="this case", extra="sglang") from error
    options: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 1 << 16, "context_length": 1024}
    options["load_format"] = "auto" if device.spec.is_host else "dummy"
    pair = EnginePair(model, device, "sglang")
    alone: list[SglangAlone] = []

    def close() -> None:
        for one in alone:
            one.close()
        pair.close()

    try:
        steps.begin("build of the engine")
        pair.infer.build(devices=device.name, timeout_s=TIMEOUT_S, **options)
        pair.train.build(devices=device.name, dtype="bfloat16", timeout_s=TIMEOUT_S)
        pair.sync_first()
        steps.begin("build of SGLang alone")
        alone.append(SglangAlone(pair.folder, device.name, options))
    except BaseException:
        close()
        raise
    ways = _BesideSglang(pair, alone[0])
    return Work(
        (
            self_timed("sync", lambda: ways.sync(None), ways.check_sync),
            self_timed("packed", lambda: ways.sync("packed"), ways.check_sync),
            self_timed("sglang_tensors", ways.own_update, lambda _: None),
            self_timed("tokens", ways.tokens, ways.check_tokens),
            self_timed("sglang_tokens", ways.own_tokens, ways.check_tokens),
        ),
        {"model": pair.name, "bytes": pair.nbytes, "names": pair.num_names, "sglang": sglang.__version__},
        num_runs=_NUM_RUNS,
        close=close,
    )


cases = (
    # Four copies of the weights are on the device at once, so that no 30B fits.
    Case(
        "weight_sync/sglang/7b",
        f"new weights and tokens of real SGLang, {QWEN_7B.name} shapes (tiny on a host), beside SGLang alone",
        functools.partial(_prepare, QWEN_7B),
        effort="full",
        estimate_s=180.0,
    ),
)
