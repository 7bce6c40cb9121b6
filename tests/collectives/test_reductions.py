"""Every operator on every dtype: what a device says of it, against what happens on its ranks."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.collectives.reduction import fold
from rlcore.devices.collectives import TorchCollectives
from rlcore.devices.generic import GenericTorchDevice
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.registry import get_device
from rlcore.types import DeviceSpec
from tests.accuracy import assert_within_rounding

# Rows are ranks. Small powers of two, so that sums and products of 8-bit floats are exact where they are not rounded.
REAL = [[1.0, -2.0, 0.5, 4.0, 0.0], [2.0, 1.0, -0.5, 4.0, 1.0], [1.0, 4.0, 0.5, -1.0, 2.0]]
COMPLEX = [[1 + 1j, -2j, 0.5, 4.0, 0.0], [2.0, 1 - 1j, -0.5, 4.0, 1j], [1j, 4.0, 0.5, -1.0, 2 + 2j]]
BOOL = [[True, False, True, False, True], [True, False, False, True, True], [True, False, True, True, False]]
PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add, "premul_sum": operator.add, "avg": operator.add, "product": operator.mul,
    "min": min, "max": max, "band": operator.and_, "bor": operator.or_, "bxor": operator.xor,
}  # fmt: skip


def values(op: str, dtype: torch.dtype) -> list[list[Any]]:
    if dtype == torch.bool:
        return BOOL
    if dtype.is_complex:
        return COMPLEX
    if dtype.is_floating_point:
        return REAL
    info = torch.iinfo(dtype)  # its ends, so that sums wrap around
    # There is no wider integer to average 64 bits in.
    low, high = (info.min // 4, info.max // 4) if (op, info.bits) == ("avg", 64) else (info.min, info.max)
    return [[low, high, 7, 5, 12], [1, 2, high - 1, 6, 10], [3, high, 0, 3, 9]]


def expected(op: str, dtype: torch.dtype, world_size: int) -> tuple[Tensor, Tensor]:
    """By Python's own numbers, which neither round nor wrap: the result, and the sum (product) of magnitudes."""
    columns = list(zip(*values(op, dtype)[:world_size], strict=True))
    if op == "premul_sum":
        columns = [tuple(value * (rank + 1) for rank, value in enumerate(column)) for column in columns]
    results = [functools.reduce(PYTHON[op], column) for column in columns]
    sizes = torch.tensor([float(functools.reduce(PYTHON[op], map(abs, column))) for column in columns])
    if dtype == torch.bool:
        return torch.tensor([bool(result) for result in results]), sizes
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        num = world_size if op == "avg" else 1
        return torch.tensor(results, dtype=wide) / num, sizes.double() / num
    if op == "avg":
        results = [abs(result) // world_size * (1 if result > 0 else -1) for result in results]
    info = torch.iinfo(dtype)
    return torch.tensor([(result - info.min) % 2**info.bits + info.min for result in results], dtype=dtype), sizes


def assert_same(got: Tensor, want: Tensor, sizes: Tensor, op: str, what: str) -> None:
    if not want.dtype.is_floating_point and not want.dtype.is_complex:
        assert got.tolist() == want.tolist(), what
        return
    terms = 0 if op in ("min", "max") else 4  # of up to three ranks; an average is divided too
    if got.dtype.is_complex:  # a product of two has two products in each part, and a sum
        got, want, sizes = torch.view_as_real(got), torch.view_as_real(want), sizes.unsqueeze(-1).expand(-1, 2)
        terms *= 3
    assert_within_rounding(got, want, terms=terms, magnitude=sizes, what=what)


def reduce_everything(rank: Any, device: str, world_size: int) -> int:
    import torch.distributed as dist

    group = rank.group(device, world_size)
    collectives = group.device.collectives
    num_native = 0
    for op in collectives.reduce_ops():
        for dtype in collectives.dtypes():
            how, what = collectives.reduction(op, dtype), f"{op} of {dtype}"
            factor = float(rank.rank + 1) if op == "premul_sum" else None
            own = torch.tensor(values(op, dtype)[rank.rank], dtype=dtype, device=group.device.torch_device)
            if how.support == "unsupported":
                with pytest.raises(UnsupportedError, match=f"^{op} of {str(dtype)[6:]} over group .*{how.reason}"):
                    group.all_reduce(own, op, factor=factor)
                continue
            want, sizes = expected(op, dtype, world_size)
            all_reduced = group.all_reduce(own.clone(), op, factor=factor).cpu()
            assert_same(all_reduced, want, sizes, op, f"{what}, {how.support}")
            rows = group.reduce_scatter(own.clone(), op, factor=factor)
            ends = [len(own) // world_size * r + min(r, len(own) % world_size) for r in range(world_size + 1)]
            part = slice(*ends[rank.rank : rank.rank + 2])
            assert_same(rows.cpu(), want[part], sizes[part], op, f"scattered {what}")
            if how.support == "native":  # then torch's own function does it too
                num_native += 1
                torch_op = getattr(dist.ReduceOp, op.upper()) if factor is None else dist._make_nccl_premul_sum(factor)
                dist.all_reduce(own, torch_op, group=group.process_group)
                assert_same(own.cpu(), want, sizes, op, f"torch's {what}")
    return num_native


def test_every_operator_on_every_dtype_does_what_the_device_says(world: tuple[str, int], on_ranks: Any) -> None:
    num_native = on_ranks(reduce_everything, world[1], *world)
    # Both: sum and product of 8 dtypes, min and max of 4 integers, avg of 4 floats. Gloo: three bitwise of 4. NCCL:
    # premul_sum of 3.
    both = 2 * 8 + 2 * 4 + 4
    assert num_native == [{"cpu": both + 3 * 4, "cuda": both + 3}[world[0]]] * world[1]


def keep_nan(rank: Any, device: str, world_size: int) -> None:
    group = rank.group(device, world_size)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2):
        for op, extreme in (("min", -1.0), ("max", world_size - 2.0)):
            own = torch.full((world_size + 1,), rank.rank - 1.0)
            own[rank.rank] = torch.nan  # at one place of each rank, and at none of the last
            found = group.all_reduce(own.to(dtype).to(group.device.torch_device), op).float().tolist()
            assert [math.isnan(value) for value in found] == [True] * world_size + [False], f"{op} of {dtype}: {found}"
            assert found[-1] == extreme


def test_the_largest_of_nan_and_a_number_is_nan(world: tuple[str, int], on_ranks: Any) -> None:
    on_ranks(keep_nan, world[1], *world)


def test_parts_are_folded_in_a_wider_dtype_and_rounded_once() -> None:
    # In bfloat16, 256 + 1 is 256 again.
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert fold(parts, "sum").item() == 258.0
    # 300 + 300 does not fit float8_e4m3fn, whose largest number is 448; their mean does, rounded to 288 or 304.
    parts = torch.tensor([[300.0], [300.0]]).to(torch.float8_e4m3fn)
    assert fold(parts, "avg").float().item() == parts[0].float().item()


def test_uint64_is_ordered_as_unsigned() -> None:
    parts = torch.tensor([[2**63, 5], [1, 2**64 - 1]], dtype=torch.uint64)
    assert fold(parts, "max").tolist() == [2**63, 2**64 - 1]
    assert fold(parts, "min").tolist() == [1, 5]


def by_spec(library: str) -> TorchCollectives:
    """Return the collectives of a device that is known by its spec alone. The table needs no device."""
    spec = DeviceSpec(
        name="other", vendor="a third party", torch_type="other", priority=1, api_version=(1, 0),
        loader="rlcore.devices.generic:GenericTorchDevice", collective_backend=library,
    )  # fmt: skip
    return GenericTorchDevice(spec, 0).collectives


def test_a_combination_that_the_library_gets_wrong_is_emulated() -> None:
    collectives = by_spec("nccl")
    found = {dtype: collectives.reduction("premul_sum", dtype).support for dtype in (torch.float16, torch.bfloat16)}
    assert found == {torch.float16: "native", torch.bfloat16: "emulated"}


@pytest.mark.parametrize("library", ["gloo", "nccl", "rccl", "xccl", "hccl", "unknown"])
def test_tables_of_operators_and_dtypes_are_rows_of_the_same_matrix(library: str) -> None:
    collectives = by_spec(library)
    native_ops = {op for op, how in collectives.reduce_ops().items() if how.support == "native"}
    more = {"gloo": {"avg", "band", "bor", "bxor"}, "nccl": {"avg", "premul_sum"}, "rccl": {"avg", "premul_sum"}}
    assert native_ops == {"sum", "product"} | more.get(library, set())
    assert collectives.reduce_ops()["max"].reason == f"max of {library} can lose NaN"
    assert collectives.reduction("max", torch.int32).support == "native"
    natively = {dtype for dtype, how in collectives.dtypes().items() if how.support == "native"}
    common = {torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8}
    rest = {"hccl": {torch.int16}, "unknown": set()}.get(library, {torch.float64, torch.uint8})
    assert natively == ({torch.float32, torch.int32} if library == "unknown" else common | rest)
    assert all(how.reason for how in collectives.dtypes().values() if how.support != "native")
    assert collectives.reduction("sum", torch.float8_e5m2).support == "emulated"
    assert collectives.reduction("sum", torch.float8_e8m0fnu).support == "unsupported"


def test_an_unknown_operator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"must be one of sum, avg, .*premul_sum; got 'mean'"):
        get_device("cpu").collectives.reduction("mean", torch.float32)
