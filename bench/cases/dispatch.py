"""What asking costs on the host, once everything is loaded: these calls are on the path of every step."""

from __future__ import annotations

from typing import Any

import torch

from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.kernels.dispatch import Choice, Query, choose
from rlcore.registry import get_device


def _prepare_device_lookup(device: Any) -> Work:
    def check(found: Any) -> None:
        expect(found is device, f"get_device({device.name!r}) returned {found!r}")

    contender = Contender(implementation="registry", run=lambda: get_device(device.name), check=check)
    return Work(contenders=(contender,), params={}, runs_on="host")


def _prepare_op_choice(device: Any) -> Work:
    def run() -> Choice:
        return choose("token_logprob", Query(device.type, torch.bfloat16, 0, 151_936))

    def check(choice: Choice) -> None:
        expect(choice.op == "token_logprob" and callable(choice.fn), f"chose {choice!r}")

    contender = Contender(implementation="dispatch", run=run, check=check)
    return Work(contenders=(contender,), params={}, runs_on="host")


device_lookup_case = Case(
    name="dispatch/device",
    description="rlcore.get_device(name)",
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
