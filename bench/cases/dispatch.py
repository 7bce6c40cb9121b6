"""The cost of look-ups on the host, once everything is loaded: these calls are on the path of every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.device import Device
from rlcore.kernels.dispatch import ChosenImplementation, Query, choose
from rlcore.registry import get_device


def _prepare_device_lookup(device: Device) -> Work:
    default = get_device()

    def contender(name: str, run: Callable[[], Any], wanted: Any) -> Contender:
        return Contender(name, run, lambda found: expect(found is wanted, f"got {found!r} instead of {wanted!r}"))

    contenders = (
        contender("registry", lambda: get_device(device.name), device),
        contender("registry, default", get_device, default),
    )
    return Work(contenders, {}, runs_on="host")


def _choose(device: Device) -> ChosenImplementation:
    return choose("token_logprob", Query(device.type, torch.bfloat16, 0, 151_936))


def _choose_anew(device: Device) -> ChosenImplementation:
    choose.cache_clear()
    return _choose(device)


def _choosing(run: Callable[[Device], ChosenImplementation]) -> Callable[[Device], Work]:
    def check(choice: ChosenImplementation) -> None:
        expect(choice.op == "token_logprob" and callable(choice.fn), f"chose {choice!r}")

    return lambda device: Work((Contender("dispatch", lambda: run(device), check),), {}, runs_on="host")


_QUICK: dict[str, Any] = {"effort": "quick", "estimate_s": 0.5}
_OP = "choosing the implementation of an operator for a"
cases = (
    Case(
        "dispatch/device",
        "rlcore.get_device(name), and without a name, which heeds RLCORE_DEVICE",
        _prepare_device_lookup,
        **_QUICK,
    ),
    Case("dispatch/op", f"{_OP} query seen before", _choosing(_choose), **_QUICK),
    Case("dispatch/op_new", f"{_OP} new query, which is looked up ever after", _choosing(_choose_anew), **_QUICK),
)
