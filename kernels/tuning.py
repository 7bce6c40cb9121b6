"""The search behind ``rlcore tune``: each candidate tile is checked against float64, then timed on the device.

Candidates take turns, three rounds of medians, of which the least counts. The usual tile stays unless another is faster
by more than one part in a hundred, about what two runs of the same kernel differ by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.device import Device
from rlcore.errors import RlcoreError, UnsupportedError
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.linear.logprob import linear_logprob
from rlcore.kernels.tile_choices import CANDIDATES, Tile, TunedTiles, identity, trying
from rlcore.kernels.token.logprob import token_logprob

_ROUNDS = 3
_GAIN = 0.01
_ROWS, _COLUMNS = 4096, 151_936
_HEAD = (4096, 4096, 65_536)
"""T, H, V."""
_CHECKED = 64
_ERROR, _GRADIENT_ERROR = 1e-3, 1e-2
"""The largest error of a log-probability, in nats, and of a gradient, as a share of its norm: it is bfloat16."""


class TimedWork(NamedTuple):
    """The work by which one family of kernels is timed."""

    run: Callable[[], object]
    error: Callable[[], float]
    """The distance from float64 of what ``run`` gives."""
    most: float


def tune(device: Device, time_ms: Callable[[Callable[[], object]], float] | None = None) -> TunedTiles:
    """Time the candidates on a device and return the best of each family that runs there.

    Raises:
        UnsupportedError: none of Triton's kernels runs on this device.
        RlcoreError: a candidate gives wrong results.
    """
    clock = _device_ms if time_ms is None else time_ms
    found: dict[str, dict[str, int]] = {}
    times: dict[str, dict[str, float]] = {}
    for name, make in _WORK.items():
        work = make(device.torch_device)
        if work is None:
            continue
        times[name] = dict.fromkeys(map(str, CANDIDATES[name]), float("inf"))
        for _ in range(_ROUNDS):
            for candidate in CANDIDATES[name]:
                with trying(name, candidate):
                    took = _checked_ms(name, candidate, work, clock)
                times[name][str(candidate)] = min(times[name][str(candidate)], took)
        found[name] = dict(_best(name, times[name]))
        del work
        device.memory.empty_cache()
    if not found:
        reason = "none of Triton's kernels runs there: rlcore ops explain token_logprob says why"
        raise UnsupportedError(f"tuning {device.name}", reason)
    device_name, triton, own = identity(device.properties().name)
    return TunedTiles(device=device_name, triton=triton, rlcore=own, tiles=found, milliseconds=times)


def _best(name: str, times: dict[str, float]) -> Tile:
    usual, *_ = CANDIDATES[name]
    fastest = min(CANDIDATES[name], key=lambda candidate: times[str(candidate)])
    return fastest if times[str(fastest)] < (1 - _GAIN) * times[str(usual)] else usual


def _checked_ms(name: str, candidate: Tile, work: TimedWork, clock: Callable[[Callable[[], object]], float]) -> float:
    error = work.error()
    if not error <= work.most:  # NaN is none
        raise RlcoreError(f"{name} with the tile {dict(candidate)} is wrong by {error:.1e}; please report it")
    return clock(work.run)


def _device_ms(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    median: float = do_bench(run, warmup=20, rep=60, return_mode="median")
    return median


# --------------------------------------------------------------------------------------------------------- the work


def _rows(device: torch.device) -> tuple[Tensor, Tensor] | None:
    query = Query(device.type, torch.bfloat16, 0, _COLUMNS, frozenset({"entropy"}))
    if choose("token_logprob", query).implementation != "triton":
        return None
    logits = torch.empty(_ROWS, _COLUMNS, dtype=torch.bfloat16, device=device).normal_(std=3)
    return logits, torch.randint(_COLUMNS, (_ROWS,), device=device)


def _statistics_work(device: torch.device) -> TimedWork | None:
    if (given := _rows(device)) is None:
        return None
    logits, targets = given
    few = targets[:_CHECKED, None]
    exact = logits[:_CHECKED].double().log_softmax(-1).gather(1, few).squeeze(1)

    def error() -> float:
        return float((token_logprob(logits, targets).logprob[:_CHECKED].double() - exact).abs().max())

    return TimedWork(lambda: token_logprob(logits, targets, with_entropy=True), error, _ERROR)


def _gradient_work(device: torch.device) -> TimedWork | None:
    if (given := _rows(device)) is None:
        return None
    logits, targets = given
    logits.requires_grad_()
    found = token_logprob(logits, targets, with_entropy=True)
    upstream = torch.ones_like(found.logprob)

    def gradient() -> Tensor:
        return torch.autograd.grad(
            [x for x in found if x is not None], logits, [upstream, upstream], retain_graph=True
        )[0]

    wide = logits.detach()[:_CHECKED].double().requires_grad_()
    true = token_logprob(wide, targets[:_CHECKED], with_entropy=True, implementation="reference")
    (exact,) = torch.autograd.grad([x.sum() for x in true if x is not None], wide)

    def error() -> float:
        return float((gradient()[:_CHECKED].double() - exact).norm() / exact.norm())

    return TimedWork(gradient, error, _GRADIENT_ERROR)


def _product_work(device: torch.device) -> TimedWork | None:
    T, H, V = _HEAD
    query = Query(device.type, torch.bfloat16, H, V, frozenset({"entropy"}))
    if choose("linear_logprob", query).implementation != "tiled":
        return None
    hidden = torch.empty(T, H, dtype=torch.bfloat16, device=device).normal_()
    weight = torch.empty(V, H, dtype=torch.bfloat16, device=device).normal_(std=H**-0.5)
    targets = torch.randint(V, (T,), device=device)
    logits = hidden[:_CHECKED].double() @ weight.double().T
    exact = logits.log_softmax(-1).gather(1, targets[:_CHECKED, None]).squeeze(1)

    def run() -> Tensor:
        with torch.no_grad():
            return linear_logprob(hidden, weight, targets, with_entropy=True).logprob

    return TimedWork(run, lambda: float((run()[:_CHECKED].double() - exact).abs().max()), _ERROR)


_WORK: dict[str, Callable[[torch.device], TimedWork | None]] = {
    "statistics of rows": _statistics_work,
    "gradient of rows": _gradient_work,
    "product of tiles": _product_work,
}
