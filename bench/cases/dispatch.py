"""What asking costs on the host, once everything is loaded: these calls are on the path of every step."""

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
        def check(found: Any) -> None:
            expect(found is wanted, f"got {found!r} instead of {wanted!r}")

        return Contender(implementation=name, run=run, check=check)

    contenders = (
        contender("registry", lambda: get_device(device.name), device),
        contender("registry, default", get_device, default),
    )
    return Work(contenders=contenders, params={}, runs_on="host")


def _prepare_op_choice(device: Device) -> Work:
    return _choosing(lambda: choose("token_logprob", Query(device.type, torch.bfloat16, 0, 151_936)))


def _prepare_new_op_choice(device: Device) -> Work:
    def run() -> ChosenImplementation:
        choose.cache_clear()
        return choose("token_logprob", Query(device.type, torch.bfloat16, 0, 151_936))

    return _choosing(run)


def _choosing(run: Callable[[], ChosenImplementation]) -> Work:
    def check(choice: ChosenImplementation) -> None:
        expect(choice.op == "token_logprob" and callable(choice.fn), f"chose {choice!r}")

    contender = Contender(implementation="dispatch", run=run, check=check)
    return Work(contenders=(contender,), params={}, runs_on="host")


device_lookup_case = Case(
    name="dispatch/device",
    description="rlcore.get_device(name), and without a name, which heeds RLCORE_DEVICE",
    prepare=_prepare_device_lookup,
    effort="quick",
    estimate_s=0.5,
)
op_choice_case = Case(
    name="dispatch/op",
    description="choosing the implementation of an operator for a query seen before",
    prepare=_prepare_op_choice,
    effort="quick",
    estimate_s=0.5,
)
new_op_choice_case = Case(
    name="dispatch/op_new",
    description="choosing the implementation of an operator for a new query, which is looked up ever after",
    prepare=_prepare_new_op_choice,
    effort="quick",
    estimate_s=0.5,
)
