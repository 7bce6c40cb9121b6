"""Plans from trainers whose parameters are cut in boxes, by FSDP and tensor parallelism: nothing falls back or is read
twice."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fused_model import FusedModel, Share, Sizes, names
from test_plan import golden, live_of, parameters_of, traced, views
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rlcore.engines.weight_sync.planning.loader_trace import LoaderTrace
from rlcore.engines.weight_sync.planning.manifest import WeightManifest, describe
from rlcore.engines.weight_sync.planning.plan import SyncPlan, make_plan
from rlcore.engines.weight_sync.planning.self_test import run_self_test
from rlcore.errors import SyncError
from rlcore.kernels.strided_copy.op import StridedCopies, StridedPiece
from rlcore.weights.shards import boxes_of_ranks
from tests.kernels import fork_ranks

SHARES = [Share(size=size, rank=rank) for size in (1, 2, 4) for rank in range(size)]
EVEN, UNEVEN = Sizes(V=16, layers=1), Sizes(V=11, I=12, layers=1)
"""FSDP cuts dimension 0 anywhere: of 11 rows, and of the 6 and 3 that tensor parallelism leaves of 12."""

Trainer = tuple[int, int, int]
"""Numbers of ranks: of FSDP, of tensor and of expert parallelism. Experts lie over the same ranks by (FSDP, EP)."""
TRAINERS: dict[str, Trainer] = {
    "FSDP 3": (3, 1, 1),
    "FSDP 4": (4, 1, 1),
    "FSDP 8": (8, 1, 1),
    "TP 2": (1, 2, 1),
    "TP 4, EP 4": (1, 4, 4),
    "FSDP 2 x TP 2": (2, 2, 1),
    "FSDP 2 x TP 2, EP 2": (2, 2, 2),
    "FSDP 2 x TP 2, EP 4": (2, 2, 4),
    "FSDP 4, EP 4": (4, 1, 4),
    "FSDP 4 x TP 2": (4, 2, 1),
    "FSDP 4 x TP 2, EP 2": (4, 2, 2),
    "FSDP 2 x TP 4": (2, 4, 1),
}
SAMPLERS = [(1, False), *itertools.product((2, 4), (False, True))]
"""Numbers of ranks, and whether each has whole experts: else a part of each. A replica's plan is that of one alone."""


def tensor_parallel_dim(name: str) -> int | None:
    """The dimension that tensor parallelism cuts: of outputs, or of inputs where outputs are summed; of norms none."""
    kind = name.split(".")[-2] if "experts" not in name else name.split(".")[4]
    return 1 if kind in ("o", "down") else None if kind == "norm" else 0


def mesh_of(name: str, trainer: Trainer) -> tuple[int, int, int | None]:
    """Return the ranks of FSDP and of the other dimension, and what that one cuts: of experts, which are whole."""
    fsdp, tp, ep = trainer
    if "experts" in name and ep > 1:
        return fsdp * tp // ep, ep, 0
    return fsdp, tp, tensor_parallel_dim(name)


def part_of(tensor: Tensor, name: str, rank: int, trainer: Trainer) -> Tensor:
    """Return what a rank holds: torch cuts by tensor or expert parallelism, then by FSDP."""
    fsdp, size, dim = mesh_of(name, trainer)
    shard, place = divmod(rank, size)
    if dim is not None:
        tensor = chunk(tensor, dim, place, size)
    return chunk(tensor, 0, shard, fsdp).contiguous()


def chunk(tensor: Tensor, dim: int, place: int, size: int) -> Tensor:
    parts = tensor.chunk(size, dim)
    return parts[place] if place < len(parts) else tensor.narrow(dim, 0, 0)


def placements(dim: int | None, size: int) -> list[Any]:
    """As FSDP2 writes them, on a mesh of which the second dimension, of this size, has cut ``dim``."""
    fsdp = _StridedShard(0, split_factor=size) if dim == 0 and size > 1 else Shard(0)
    return [fsdp, Replicate() if dim is None else Shard(dim)]


def fake_mesh(*shape: int) -> Any:
    mesh = SimpleNamespace(mesh=torch.arange(torch.Size(shape).numel()).view(shape))
    mesh._get_root_mesh = lambda: mesh
    mesh.mesh_dim_names = None
    return mesh


def laid_out(manifest: WeightManifest, num_ranks: int, placed: Any) -> WeightManifest:
    """The same weights, with each parameter over the mesh and by the placements of ``placed(name)``."""
    named = {one.parameter: one.name for one in manifest.weights}
    layouts: dict[Any, int] = {}
    parameters = []
    for number, one in enumerate(manifest.parameters):
        mesh, cuts = placed(named[number])
        fake: Any = SimpleNamespace(device_mesh=mesh, placements=cuts, shape=torch.Size(one.shape))
        boxes = boxes_of_ranks(fake, num_ranks)
        assert boxes is not None, (named[number], fake.placements)
        parameters.append(msgspec.structs.replace(one, layout=layouts.setdefault(boxes, len(layouts))))
    return msgspec.structs.replace(manifest, num_ranks=num_ranks, parameters=tuple(parameters), layouts=tuple(layouts))


@functools.cache
def plain(sizes: Sizes, is_packed: bool = False) -> tuple[WeightManifest, dict[str, Tensor]]:
    """Packed, the experts of a layer are two parameters, as in transformers."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in names(sizes)}
    return describe(views(sizes, torch.float32, is_packed=is_packed), 1).manifest, weights


@functools.cache
def trace_of(sizes: Sizes, share: Share, is_packed: bool = False) -> LoaderTrace:
    return traced(sizes, share, plain(sizes, is_packed)[0])


def carry_out(plan: SyncPlan, parts: dict[tuple[int, int], Tensor], live: dict[str, Tensor]) -> None:
    keys = list(parts)
    pieces = [StridedPiece(keys.index((one.rank, one.parameter)), one.destination, *one.copy) for one in plan.pieces]
    plan.fill(live)
    StridedCopies(pieces, list(parts.values()), [live[one.name] for one in plan.destinations]).run()


def assert_is_loaded(
    manifest: WeightManifest, parts: dict[tuple[int, int], Tensor], sizes: Sizes, share: Share
) -> None:
    """The plan for a receiver writes what its loader does, out of these parts by (rank, parameter)."""
    weights = plain(sizes)[1]
    is_packed = len(manifest.parameters) < len(manifest.weights)
    plan = make_plan(replace(trace_of(sizes, share, is_packed), manifest=manifest))
    assert not plan.fallback_bytes and not plan.fallback and not plan.fallback_weights
    live, want = live_of(sizes, share), golden(sizes, share, weights)
    carry_out(plan, parts, live)
    assert all(torch.equal(live[name], tensor) for name, tensor in want.items())
    filled = sum(torch.Size(one.shape).numel() for one in plan.fills)
    assert plan.needed_bytes == 4 * (sum(tensor.numel() for tensor in want.values()) - filled), "each byte once"


def held_by(manifest: WeightManifest, trainer: Trainer) -> WeightManifest:
    def placed(name: str) -> tuple[Any, list[Any]]:
        fsdp, size, dim = mesh_of(name, trainer)
        return fake_mesh(fsdp, size), placements(dim, size)

    return laid_out(manifest, trainer[0] * trainer[1], placed)


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS.keys())
def test_every_trainer_fills_every_sampler(trainer: Trainer, sizes: Sizes) -> None:
    """Sixty pairs, each of even and of uneven weights."""
    assert len(TRAINERS) * len(SAMPLERS) == 60
    manifest, weights = plain(sizes, is_packed=trainer[2] > 1)
    named = {one.parameter: one.name for one in manifest.weights}
    held = held_by(manifest, trainer)
    parts = {
        (rank, number): part_of(tensor, named[number], rank, trainer)
        for number, tensor in enumerate(parameters_of(manifest, weights))
        for rank in range(trainer[0] * trainer[1])
    }
    for size, splits_experts in SAMPLERS:
        for rank in range(size):
            assert_is_loaded(held, parts, sizes, Share(size=size, rank=rank, splits_experts=splits_experts))


@pytest.mark.parametrize("dims", [(1,), (0, 1), (1, 1), (None, 1), (1, None)], ids=str)
def test_other_dimensions_and_replicas(dims: tuple[int | None, ...]) -> None:
    """Each mesh dimension, of three and then two ranks, cuts that dimension of a matrix, or has copies of it."""
    manifest, weights = plain(UNEVEN)
    shape = (3, 2)[: len(dims)]
    named = {one.parameter: one.name for one in manifest.weights}

    def cuts(name: str) -> list[int | None]:
        return [dim if dim is None or dim < weights[name].dim() else None for dim in dims]

    def placed(name: str) -> tuple[Any, list[Any]]:
        return fake_mesh(*shape), [Replicate() if dim is None else Shard(dim) for dim in cuts(name)]

    held = laid_out(manifest, torch.Size(shape).numel(), placed)
    parts = {}
    for rank, place in enumerate(itertools.product(*map(range, shape))):
        for number, tensor in enumerate(parameters_of(manifest, weights)):
            own = tensor
            for dim, at, size in zip(cuts(named[number]), place, shape, strict=True):
                own = own if dim is None else chunk(own, dim, at, size)
            parts[rank, number] = own.contiguous()
    for share in SHARES[:3]:
        assert_is_loaded(held, parts, UNEVEN, share)


def test_the_self_test_reads_boxes() -> None:
    held = held_by(plain(EVEN)[0], (2, 2, 1))
    share = Share(size=2, rank=1)
    plan = make_plan(replace(trace_of(EVEN, share), manifest=held))
    model = FusedModel(EVEN, share)
    assert run_self_test(plan, held, lambda: dict(model.named_parameters()), model.load_weights) == {}


def test_a_layout_of_rows_is_written_as_ever() -> None:
    """Peers of other versions compare digests of the bytes."""
    held = laid_out(plain(EVEN)[0], 2, lambda name: (fake_mesh(2, 1), [Shard(0), Replicate()]))
    assert all(len(box) == 2 for layout in held.layouts for box in layout)


def test_what_is_no_box_is_no_plan() -> None:
    mesh = fake_mesh(2)
    for odd in (Partial(), _StridedShard(0, split_factor=2)):  # two runs of rows on each rank
        fake: Any = SimpleNamespace(device_mesh=mesh, placements=[odd], shape=torch.Size([8, 4]))
        assert boxes_of_ranks(fake, 2) is None


@pytest.mark.parametrize("box", [(0,), (0, 4, 1), ()], ids=str)
def test_a_box_without_an_end_is_refused(box: tuple[int, ...]) -> None:
    manifest = msgspec.structs.replace(plain(EVEN)[0])
    sent = msgspec.msgpack.decode(manifest.to_bytes())
    sent["layouts"] = [[box]]
    with pytest.raises(SyncError, match=r"a box has \(first, end\) of one dimension after the other"):
        WeightManifest.from_bytes(msgspec.msgpack.encode(sent))


@pytest.mark.slow
def test_parts_of_real_ranks(tmp_path: Path) -> None:
    """Torch's FSDP2 over tensor parallelism on four processes: its local parts, plans and checkpoints are right."""
    ranks, launcher = Path(__file__).with_name("ranked_boxes.py"), Path(fork_ranks.__file__)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(launcher), "4", str(tmp_path), str(ranks)]
    ended = subprocess.run(command, env=environment, cwd=ranks.parents[3], timeout=300, check=False)
    said = "\n".join(file.read_text() for file in sorted(tmp_path.glob("rank?")))
    assert ended.returncode == 0, said
