"""The copies of a weight sync alone: all pieces of a plan on one device, as a share of a plain copy of the same bytes.

Weights lie one after the other in the trainer's memory and fused in the engine's, as vLLM has them: thousands of pieces
of a few KiB to a GB. A shard of a tensor parallel engine reads columns of some.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.bench.cases.models import QWEN_7B, QWEN_30B_A3B, ModelShape
from rlcore.device import Device
from rlcore.errors import UnsupportedError
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.strided_copy.op import StridedCopies, StridedPiece
from rlcore.tensor_data import dtype_name

_ALIGNMENT = 256
_NUM_CHECKED = 200
_CHECKED_AT_ONCE = 1 << 28
_ON_HOST = 16
"""By which every width is divided where the device is the host."""


class _WeightMove(NamedTuple):
    """The first ``kept`` columns of a weight [rows, columns], to rows of a fused tensor that begin at ``offset``."""

    rows: int
    columns: int
    kept: int
    offset: int
    """In elements of the engine's memory."""


def _moves(model: ModelShape, size: int) -> Iterator[_WeightMove]:
    """Yield the moves of all weights to the first of ``size`` shards."""
    offset = 0
    for rows, columns, dim in _weights(model):
        kept_rows, kept = (rows // size, columns) if dim == 0 else (rows, columns // size)
        yield _WeightMove(kept_rows, columns, kept, offset)
        offset += kept_rows * kept


def _weights(model: ModelShape) -> Iterator[tuple[int, int, int]]:
    """Yield rows, columns and the dimension that shards cut, in the order of the fused tensors; norms are whole."""
    hidden = model.hidden
    yield model.vocabulary, hidden, 0
    yield model.vocabulary, hidden, 0
    for _ in range(model.layers):
        yield from ((rows, hidden, 0) for rows in (model.q, model.kv, model.kv))
        yield hidden, model.q, 1
        for _ in range(model.mlps):
            yield from ((model.inner, hidden, 0), (model.inner, hidden, 0), (hidden, model.inner, 1))
        yield from ((1, hidden, 2), (1, hidden, 2))


class _CopyProblem:
    """The memory of both sides and the pieces between them."""

    def __init__(self, device: Device, model: ModelShape, dtype: torch.dtype, size: int) -> None:
        moves = [move if move.rows else move._replace(rows=1) for move in _moves(model, size)]
        numels = [math.prod((move.rows, move.columns)) for move in moves]
        self.numel = sum(move.rows * move.kept for move in moves)
        step = _ALIGNMENT // dtype.itemsize
        spaces = [-(-numel // step) * step for numel in numels]
        self.trainer = torch.empty(sum(spaces), dtype=dtype, device=device.torch_device)
        self.engine = torch.empty(self.numel, dtype=torch.bfloat16, device=device.torch_device)
        for part in self.trainer.split(_CHECKED_AT_ONCE):  # type: ignore[no-untyped-call]
            part.uniform_(-1, 1)
        self.sources = [part[:numel] for part, numel in zip(self.trainer.split(spaces), numels, strict=True)]  # type: ignore[no-untyped-call]
        self.pieces = [
            StridedPiece(number, 0, (move.rows, move.kept), 0, (move.columns, 1), move.offset, (move.kept, 1))
            for number, move in enumerate(moves)
        ]

    @property
    def moved_bytes(self) -> int:
        """Bytes that are read and written."""
        return self.numel * (self.trainer.dtype.itemsize + self.engine.dtype.itemsize)

    def copies(self, implementation: str) -> StridedCopies:
        return StridedCopies(self.pieces, self.sources, [self.engine], implementation=implementation)

    def check(self, run: Any) -> None:
        self.engine.fill_(9)
        run()
        step = max(1, len(self.pieces) // _NUM_CHECKED)
        for piece in (*self.pieces[::step], self.pieces[-1]):
            source = self.sources[piece.source].as_strided(
                piece.shape, piece.source_stride, self.sources[piece.source].storage_offset()
            )
            got = self.engine.as_strided(piece.shape, piece.stride, piece.offset)
            expect(torch.equal(got, source.to(got.dtype)), f"weight {piece.source} arrived with other values")
        # In parts: of tens of GiB a comparison takes half as much again.
        are_written = all(not bool((part == 9).any()) for part in self.engine.split(_CHECKED_AT_ONCE))  # type: ignore[no-untyped-call]
        expect(are_written, "some of the engine's elements were not written")


def _contender(problem: _CopyProblem, device: Device, implementation: str) -> Contender | None:
    try:
        choose("strided_copy", Query(device.type, torch.uint8, 0, 0), implementation)
    except UnsupportedError:
        return None
    copies = problem.copies(implementation)
    return Contender(implementation, copies.run, lambda _: problem.check(copies.run))


def _plain_copy(problem: _CopyProblem) -> Contender:
    """Return a copy of as many bytes each way, in one piece."""
    pattern = problem.trainer.view(torch.uint8)
    half = min(problem.engine.nbytes, problem.moved_bytes // 2, pattern.numel())
    to, from_ = problem.engine.view(torch.uint8)[:half], pattern[:half]

    def run() -> Tensor:
        return to.copy_(from_)

    def check(_: Tensor) -> None:
        run()
        expect(torch.equal(to[:: 1 << 10], from_[:: 1 << 10]), "the copy has other values")

    params = {"bytes": half}
    return Contender("device_copy", run, check, params=params)


def _for_host(model: ModelShape) -> ModelShape:
    return replace(model.divided(_ON_HOST), layers=2, experts=min(model.experts, 4))


def _prepare(model: ModelShape, dtype: torch.dtype, size: int, device: Device) -> Work:
    problem = _CopyProblem(device, _for_host(model) if device.spec.is_host else model, dtype, size)
    found = (_contender(problem, device, implementation) for implementation in ("triton", "views"))
    return Work(
        (*(contender for contender in found if contender), _plain_copy(problem)),
        {"pieces": len(problem.pieces), "elements": problem.numel, "dtype": dtype_name(dtype)},
        bytes=problem.moved_bytes,
        runs_on="stream",
    )


def _case(name: str, what: str, model: ModelShape, dtype: torch.dtype, size: int) -> Case:
    return Case(
        f"weight_sync/copies/{name}",
        f"all copies of a weight sync on one device, {what}, beside a plain copy of as many bytes",
        functools.partial(_prepare, model, dtype, size),
        estimate_s=30.0,
    )


cases = (
    _case("7b", "Qwen2.5-7B shapes in bfloat16", QWEN_7B, torch.bfloat16, 1),
    _case("7b_float32", "Qwen2.5-7B shapes from float32", QWEN_7B, torch.float32, 1),
    _case("7b_tp2", "one of two shares of Qwen2.5-7B shapes", QWEN_7B, torch.bfloat16, 2),
    _case("30b_a3b", "Qwen3-30B-A3B shapes in bfloat16", QWEN_30B_A3B, torch.bfloat16, 1),
)
