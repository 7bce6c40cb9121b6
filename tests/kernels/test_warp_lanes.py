"""Parts whose warps have other than 32 lanes: which of them operators in Triton take, by data of the device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.warm import run_warm

pytest.importorskip("triton", reason="triton has no build for this platform")

# What Triton's driver says on a machine with such a part; nothing is built for it.
CHOOSE = """
import json, sys, torch
from types import ModuleType, SimpleNamespace
from triton.runtime import driver
from rlcore.kernels.dispatch import Query, choose

device, lanes, arch = json.loads(sys.argv[1])
interface = ModuleType(f"torch.{device}")
target = SimpleNamespace(arch=arch, warp_size=lanes)
driver.set_active(SimpleNamespace(get_device_interface=lambda: interface, get_current_target=lambda: target))
query = Query(device, torch.bfloat16, 4096, 151_936)
operators = "token_logprob", "linear_logprob", "linear_loss", "gae", "group_advantage", "strided_copy"
found = {op: choose(op, query) for op in operators}
reasons = {reason for choice in found.values() for _, reason in choice.refused if "lanes" in reason}
print(json.dumps([{op: choice.implementation for op, choice in found.items()}, sorted(reasons)]))
"""
IN_TRITON = {"token_logprob", "gae", "group_advantage", "strided_copy"}


def chosen(device: str, lanes: int, arch: Any) -> tuple[set[str], list[str]]:
    """Return the operators that would run in Triton, and what the others say of lanes."""
    done = run_warm(["-c", CHOOSE, json.dumps([device, lanes, arch])])
    assert done.returncode == 0, done.stderr
    found, reasons = json.loads(done.stdout.splitlines()[-1])
    return {op for op, name in found.items() if name == "triton"}, reasons


@pytest.mark.parametrize(
    ("lanes", "arch"),
    [pytest.param(32, 80, marks=pytest.mark.slow), (64, "gfx942"), pytest.param(32, "gfx1100", marks=pytest.mark.slow)],
)
def test_operators_run_in_triton_on_parts_that_a_device_declares(lanes: int, arch: Any) -> None:
    operators, reasons = chosen("cuda", lanes, arch)
    assert operators >= IN_TRITON and reasons == []


def test_other_lanes_are_refused_by_what_the_device_declares() -> None:
    where = "as warp_lanes of the device says, not"
    assert chosen("cuda", 128, 1) == (set(), [f"its tiles are laid out for warps of 32 or 64 lanes, {where} 128"])
    assert chosen("xpu", 16, 1) == (set(), [f"its tiles are laid out for warps of 32 lanes, {where} 16"])
