"""What HCCL is said to reduce itself, what is emulated and why, and what no library reduces; needs no torch_npu."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.collectives.groups import new_group
from rlcore.devices.ascend.collectives import HcclCollectives
from rlcore.devices.collectives import REDUCE_OPS
from rlcore.errors import UnsupportedError
from rlcore.registry import get_device

NATIVE_OPS = {"sum", "product"}
LOSES_NAN = {"min", "max"}
NATIVE_DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8}


@pytest.fixture
def hccl() -> HcclCollectives:
    spec = SimpleNamespace(collective_backend="hccl")
    device: Any = SimpleNamespace(evidence="declared", name="npu:0", type="npu", spec=spec)
    return HcclCollectives(device)


def test_what_hccl_has_no_operator_for_is_emulated_and_named(hccl: HcclCollectives) -> None:
    found = hccl.reduce_ops()
    assert {op for op, how in found.items() if how.support == "native"} == NATIVE_OPS
    for op in set(REDUCE_OPS) - NATIVE_OPS - LOSES_NAN:
        assert (found[op].support, found[op].reason, found[op].evidence) == (
            "emulated",
            f"hccl has no {op}",
            "declared",
        )


def test_dtypes_that_hccl_does_not_sum_are_emulated_and_named(hccl: HcclCollectives) -> None:
    found = hccl.dtypes()
    assert {dtype for dtype, how in found.items() if how.support == "native"} == NATIVE_DTYPES
    for dtype in (torch.float64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        assert (found[dtype].support, found[dtype].reason) == ("emulated", f"hccl has no sum of {name}")


@pytest.mark.parametrize(
    ("op", "dtype", "support", "reason"),
    [
        ("product", torch.bfloat16, "emulated", "hccl has no product of bfloat16"),
        ("product", torch.int16, "emulated", "hccl has no product of int16"),
        ("product", torch.float16, "native", ""),
        ("avg", torch.float32, "emulated", "hccl has no avg"),
        ("max", torch.int64, "native", ""),
        ("max", torch.float32, "emulated", "max of hccl can lose NaN"),
        ("max", torch.complex64, "unsupported", "complex numbers have no order"),
        ("band", torch.float32, "unsupported", "bits are of integers and bool"),
        ("sum", torch.float8_e4m3fnuz, "unsupported", "float8_e4m3fnuz cannot be reduced, only moved"),
    ],
)
def test_a_reduction_is_native_emulated_or_refused(
    hccl: HcclCollectives, op: str, dtype: torch.dtype, support: str, reason: str
) -> None:
    found = hccl.reduction(op, dtype)
    assert (found.support, found.reason) == (support, reason)


def test_a_group_refuses_a_dtype_by_its_devices_word(
    hccl: HcclCollectives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of the CPU, whose device says what HCCL's does."""
    group = new_group(get_device("cpu"), rank=0, world_size=1, rendezvous=tmp_path, timeout_s=30)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(group.device, "collectives", hccl)
        with pytest.raises(UnsupportedError, match=r"^max of complex64 .*complex numbers have no order"):
            group.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
    group.destroy()


def test_a_stream_with_priority_is_refused_as_torch_npu_takes_it_back(hccl: HcclCollectives) -> None:
    with pytest.raises(UnsupportedError, match=r"a high-priority stream of collectives on npu:0.*torch_npu replaces"):
        hccl.init_kwargs(is_high_priority=True)
