"""Strided copies, against one ``copy_`` of views at a time.

The bodies run with every implementation that the device has; test_triton.py runs this file under Triton's interpreter.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.strided_copy.op import StridedCopies, StridedPiece
from rlcore.kernels.strided_copy.words import tables
from tests.accuracy import assert_within_rounding

CASTS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
    (torch.uint8, torch.uint8),
    (torch.int64, torch.int64),
    (torch.float32, torch.bool),  # not converted by Triton
]


ON_EACH = pytest.mark.parametrize(
    ("device", "implementation"),
    [
        ("cpu", "views"),
        *[("cpu", "triton")] * (os.environ.get("TRITON_INTERPRET") == "1"),
        pytest.param("cuda", "views", marks=pytest.mark.gpu),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
    ],
    indirect=True,
)
"""On the processor Triton's implementation runs under the interpreter alone."""


@pytest.fixture
def implementation(request: pytest.FixtureRequest, device: Any) -> str:
    try:
        choose("strided_copy", Query(device.type, torch.uint8, 0, 0), request.param)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture
def rounds_as_torch(implementation: str) -> bool:
    """Triton's interpreter cuts off what a narrower float does not hold; its compiler rounds."""
    return implementation != "triton" or os.environ.get("TRITON_INTERPRET") != "1"


def random_tensors(rng: random.Random, dtype: torch.dtype, device: Any, count: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    found = []
    for _ in range(count):
        memory = torch.randn(numel + 16, generator=generator) * 50
        tensor = memory.to(dtype).to(device.torch_device)
        found.append(tensor[rng.choice([0, 0, 8, 1]) :][:numel])  # addresses of every alignment
    return found


def random_pieces(rng: random.Random, count: int, numel: int) -> list[StridedPiece]:
    """Into disjoint rows of each destination, from anywhere."""
    found = []
    for number in range(count):
        shape = tuple(rng.choice([1, 2, 3, 8, 16, 40]) for _ in range(rng.randint(0, 4)))
        size = 1
        for n in shape:
            size *= n
        if size > numel:
            shape, size = (numel,), numel
        stride, source_stride = dense(shape, rng), dense(shape, rng)
        if rng.random() < 0.2:
            source_stride = tuple(0 if rng.random() < 0.5 else s for s in source_stride)
        offset = rng.choice([0, 0, 3]) if size + 3 <= numel else 0
        source_offset = rng.randint(0, numel - size)
        source_offset -= source_offset % rng.choice([1, 16])
        found.append(StridedPiece(rng.randrange(3), number, shape, source_offset, source_stride, offset, stride))
    return found


def dense(shape: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    order = list(range(len(shape)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def expected(pieces: list[StridedPiece], sources: list[Tensor], destinations: list[Tensor]) -> list[Tensor]:
    found = [tensor.clone() for tensor in destinations]
    for piece in pieces:
        source = sources[piece.source]
        found[piece.destination].as_strided(piece.shape, piece.stride, piece.offset).copy_(
            source.as_strided(piece.shape, piece.source_stride, source.storage_offset() + piece.source_offset)
        )
    return found


@ON_EACH
@pytest.mark.parametrize("dtypes", CASTS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_every_piece_arrives_and_nothing_else_changes(
    dtypes: tuple[torch.dtype, torch.dtype], seed: int, implementation: str, rounds_as_torch: bool, device: Any
) -> None:
    source, destination = dtypes
    rng = random.Random(seed)
    numel = 5000
    sources = random_tensors(rng, source, device, 3, numel)
    destinations = random_tensors(rng, destination, device, 24, numel)
    pieces = random_pieces(rng, len(destinations), numel)
    want = expected(pieces, sources, destinations)
    copies = StridedCopies(pieces, sources, destinations, implementation=implementation)
    assert copies.implementation == implementation
    copies.run()
    for got, true in zip(destinations, want, strict=True):
        if rounds_as_torch or source == destination or not destination.is_floating_point:
            assert torch.equal(got, true)
        else:
            assert_within_rounding(got, true, terms=2)  # cut off: up to two half units


@ON_EACH
def test_bits_that_are_no_numbers_arrive_as_they_are(implementation: str, device: Any) -> None:
    bits = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    source = bits.to(device.torch_device).view(torch.bfloat16)
    destination = torch.zeros_like(source)
    piece = StridedPiece(0, 0, (2048,), 0, (1,), 0, (1,))
    StridedCopies([piece], [source], [destination], implementation=implementation).run()
    assert torch.equal(destination.view(torch.uint8), source.view(torch.uint8))


@ON_EACH
def test_rounding_is_torchs(implementation: str, rounds_as_torch: bool, device: Any) -> None:
    if not rounds_as_torch:
        pytest.skip("Triton's interpreter does not round")
    source = torch.cat([torch.linspace(-3, 3, 4001), torch.tensor([1e-40, 3.4e38, float("inf")])])
    source = source.to(device.torch_device)
    destination = torch.zeros(len(source), dtype=torch.bfloat16, device=source.device)
    piece = StridedPiece(0, 0, (len(source),), 0, (1,), 0, (1,))
    StridedCopies([piece], [source], [destination], implementation=implementation).run()
    assert torch.equal(destination, source.bfloat16())


@ON_EACH
@pytest.mark.parametrize("shift", [0, 16, 1])
def test_other_tensors_are_used_from_then_on(shift: int, implementation: str, device: Any) -> None:
    pieces = [StridedPiece(0, 0, (10, 64), 0, (64, 1), 0, (64, 1))]
    sources = [torch.randn(1000, device=device.torch_device)]
    destinations = [torch.zeros(1000, device=device.torch_device)]
    copies = StridedCopies(pieces, sources, destinations, implementation=implementation)
    copies.run()
    others = [torch.randn(2000, device=device.torch_device)[shift:]], [torch.zeros(1000, device=device.torch_device)]
    copies.bind(*others)
    before = destinations[0].clone()
    copies.run()
    assert torch.equal(others[1][0][:640], others[0][0][:640])
    assert torch.equal(destinations[0], before)


@ON_EACH
def test_nothing_to_copy(implementation: str, device: Any) -> None:
    empty = torch.empty(0, 4, device=device.torch_device)
    StridedCopies([], [], [], implementation="views").run()
    piece = StridedPiece(0, 0, (0, 4), 0, (4, 1), 0, (4, 1))
    StridedCopies([piece], [empty], [empty], implementation=implementation).run()


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (
            StridedPiece(0, 0, (10,), 91, (1,), 0, (1,)),
            "^a strided copy reaches element 100 of source 0, whose memory holds 100",
        ),
        (
            StridedPiece(0, 0, (5, 2), 0, (2, 1), 0, (25, 1)),
            "reaches element 101 of destination 0, whose memory holds 100",
        ),
    ],
)
def test_a_piece_beyond_its_memory_is_refused(piece: StridedPiece, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        StridedCopies([piece], [torch.zeros(100)], [torch.zeros(100)])
    copies = StridedCopies([], [torch.zeros(100)], [torch.zeros(100)])
    copies.bind([torch.zeros(0)], [torch.zeros(0)])


def test_memory_that_was_freed_is_refused() -> None:
    source, destination = torch.zeros(100), torch.zeros(100)
    copies = StridedCopies([StridedPiece(0, 0, (100,), 0, (1,), 0, (1,))], [source], [destination])
    source.untyped_storage().resize_(0)
    with pytest.raises(InvalidInputError, match=r"whose memory holds 0\. Was it moved, freed, or made for another"):
        copies.bind([source], [destination])


@pytest.mark.parametrize(
    ("dtypes", "offset", "shape", "stride", "kind"),
    [
        ((torch.bfloat16, torch.bfloat16), 0, (4096,), (1,), (torch.int32, 4, 1)),  # 16 bytes at a time
        ((torch.bfloat16, torch.bfloat16), 4, (4096,), (1,), (torch.int64, 1, 1)),
        ((torch.bfloat16, torch.bfloat16), 2, (4096,), (1,), (torch.int32, 1, 1)),
        ((torch.bfloat16, torch.bfloat16), 1, (4096,), (1,), (torch.int16, 1, 1)),
        ((torch.bfloat16, torch.bfloat16), 0, (8, 384), (768, 1), (torch.int32, 4, 2)),  # a shard of columns
        ((torch.bfloat16, torch.bfloat16), 0, (8, 36), (768, 1), (torch.int64, 1, 2)),
        ((torch.float32, torch.bfloat16), 0, (8, 384), (768, 1), (torch.float32, 8, 2)),
        ((torch.float32, torch.bfloat16), 0, (16, 16), (1, 16), (torch.float32, 1, 3)),  # transposed
    ],
    ids=str,
)
def test_words_are_as_wide_as_both_ends_admit(
    dtypes: tuple[torch.dtype, torch.dtype], offset: int, shape: Any, stride: Any, kind: tuple[torch.dtype, int, int]
) -> None:
    sources, destinations = ([torch.zeros(8192, dtype=dtype)] for dtype in dtypes)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (*sources, *destinations))
    rows = tuple(shape[-1] ** (len(shape) - 1 - dim) for dim in range(len(shape)))
    piece = StridedPiece(0, 0, shape, offset, stride, 0, rows)
    (table,) = tables([piece], sources, destinations)
    assert (table.kind.source, table.kind.lanes, table.kind.num_dims) == kind


def test_a_piece_of_many_dimensions_is_cut() -> None:
    shape, stride, source_stride = (3, 2, 3, 2, 3), (1000, 300, 70, 20, 3), (2000, 700, 150, 40, 5)
    piece = StridedPiece(0, 0, shape, 0, source_stride, 0, stride)
    found = tables([piece], [torch.zeros(20000)], [torch.zeros(20000)])
    assert sum(int(table.num_words.sum()) for table in found) == 108
    assert all(table.kind.num_dims <= 4 for table in found)


@pytest.mark.gpu
def test_a_piece_of_more_than_two_to_the_31_elements() -> None:
    numel = 2**31 + 4099
    source = torch.arange(numel, device="cuda", dtype=torch.int32).to(torch.int16)
    destination = torch.zeros_like(source)
    piece = StridedPiece(0, 0, (numel - 1,), 1, (1,), 0, (1,))
    StridedCopies([piece], [source], [destination], implementation="triton").run()
    assert torch.equal(destination[:-1], source[1:])


@pytest.mark.multigpu
def test_another_devices_memory_is_read_whatever_device_is_current() -> None:
    source = torch.randn(1 << 20, device="cuda:0")
    destination = torch.zeros(1 << 20, device="cuda:1", dtype=torch.bfloat16)
    torch.cuda.synchronize(0)
    piece = StridedPiece(0, 0, (1 << 10, 512), 0, (1024, 1), 0, (1024, 1))
    with torch.cuda.device(0):
        StridedCopies([piece], [source], [destination], implementation="triton").run()
    torch.cuda.synchronize(1)
    want = source.view(1 << 10, 1024)[:, :512].to(torch.bfloat16).to("cuda:1")
    assert torch.equal(destination.view(1 << 10, 1024)[:, :512], want)
