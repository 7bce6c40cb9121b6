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

MESHES = {
    "FSDP 4": (4, 1),
    "TP 2": (1, 2),
    "TP 4": (1, 4),
    "FSDP 2 x TP 2": (2, 2),
    "FSDP 4 x TP 2": (4, 2),
    "FSDP 2 x TP 4": (2, 4),
}


def tensor_parallel_dim(name: str) -> int | None:
    """The dimension that tensor parallelism cuts: of outputs, or of inputs where outputs are summed; of norms none."""
    kind = name.split(".")[-2] if "experts" not in name else name.split(".")[4]
    return 1 if kind in ("o", "down") else None if kind == "norm" else 0


def part_of(tensor: Tensor, name: str, fsdp: tuple[int, int], tp: tuple[int, int]) -> Tensor:
    """Return what the rank (place, size) of both holds: torch cuts by tensor parallelism, then by FSDP."""
    dim = tensor_parallel_dim(name)
    if dim is not None:
        tensor = chunk(tensor, dim, *tp)
    return chunk(tensor, 0, *fsdp).contiguous()


def chunk(tensor: Tensor, dim: int, place: int, size: int) -> Tensor:
    parts = tensor.chunk(size, dim)
    return parts[place] if place < len(parts) else tensor.narrow(dim, 0, 0)


def placements(name: str, num_tp: int) -> list[Any]:
    """As FSDP2 writes them, on a mesh (FSDP, TP)."""
    dim = tensor_parallel_dim(name)
    fsdp = _StridedShard(0, split_factor=num_tp) if dim == 0 and num_tp > 1 else Shard(0)
    return [fsdp, Replicate() if dim is None else Shard(dim)]


def on_mesh(manifest: WeightManifest, shape: tuple[int, ...], placed: Any) -> WeightManifest:
    """The same weights, with each parameter laid out as ``placed(name)`` over ranks of this mesh."""
    num_ranks = torch.Size(shape).numel()
    mesh = SimpleNamespace(mesh=torch.arange(num_ranks).view(shape))
    named = {one.parameter: one.name for one in manifest.weights}
    layouts: dict[Any, int] = {}
    parameters = []
    for number, one in enumerate(manifest.parameters):
        fake: Any = SimpleNamespace(device_mesh=mesh, placements=placed(named[number]), shape=torch.Size(one.shape))
        boxes = boxes_of_ranks(fake, num_ranks)
        assert boxes is not None, (named[number], fake.placements)
        parameters.append(msgspec.structs.replace(one, layout=layouts.setdefault(boxes, len(layouts))))
    return msgspec.structs.replace(manifest, num_ranks=num_ranks, parameters=tuple(parameters), layouts=tuple(layouts))


@functools.cache
def plain(sizes: Sizes) -> tuple[WeightManifest, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in names(sizes)}
    return describe(views(sizes, torch.float32), 1).manifest, weights


@functools.cache
def trace_of(sizes: Sizes, share: Share) -> LoaderTrace:
    return traced(sizes, share, plain(sizes)[0])


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
    plan = make_plan(replace(trace_of(sizes, share), manifest=manifest))
    assert not plan.fallback_bytes and not plan.fallback and not plan.fallback_weights
    live, want = live_of(sizes, share), golden(sizes, share, weights)
    carry_out(plan, parts, live)
    assert all(torch.equal(live[name], tensor) for name, tensor in want.items())
    filled = sum(torch.Size(one.shape).numel() for one in plan.fills)
    assert plan.needed_bytes == 4 * (sum(tensor.numel() for tensor in want.values()) - filled), "each byte once"


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES.keys())
def test_fsdp_over_tensor_parallelism(mesh: tuple[int, int], sizes: Sizes) -> None:
    manifest, _ = plain(sizes)
    named = {one.parameter: one.name for one in manifest.weights}
    held = on_mesh(manifest, mesh, lambda name: placements(name, mesh[1]))
    whole = parameters_of(manifest, plain(sizes)[1])
    parts = {
        (fsdp * mesh[1] + tp, number): part_of(tensor, named[number], (fsdp, mesh[0]), (tp, mesh[1]))
        for (number, tensor), fsdp, tp in itertools.product(enumerate(whole), range(mesh[0]), range(mesh[1]))
    }
    for share in SHARES:
        assert_is_loaded(held, parts, sizes, share)


@pytest.mark.parametrize("dims", [(1,), (0, 1), (1, 1), (None, 1), (1, None)], ids=str)
def test_other_dimensions_and_replicas(dims: tuple[int | None, ...]) -> None:
    """Each mesh dimension, of three and then two ranks, cuts that dimension of a matrix, or has copies of it."""
    manifest, weights = plain(UNEVEN)
    shape = (3, 2)[: len(dims)]
    named = {one.parameter: one.name for one in manifest.weights}

    def cuts(name: str) -> list[int | None]:
        return [dim if dim is None or dim < weights[name].dim() else None for dim in dims]

    held = on_mesh(manifest, shape, lambda name: [Replicate() if dim is None else Shard(dim) for dim in cuts(name)])
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
    held = on_mesh(plain(EVEN)[0], (2, 2), lambda name: placements(name, 2))
    share = Share(size=2, rank=1)
    plan = make_plan(replace(trace_of(EVEN, share), manifest=held))
    model = FusedModel(EVEN, share)
    assert run_self_test(plan, held, lambda: dict(model.named_parameters()), model.load_weights) == {}


def test_a_layout_of_rows_is_written_as_ever() -> None:
    """Peers of other versions compare digests of the bytes."""
    held = on_mesh(plain(EVEN)[0], (2, 1), lambda name: [Shard(0), Replicate()])
    assert all(len(box) == 2 for layout in held.layouts for box in layout)


def test_what_is_no_box_is_no_plan() -> None:
    mesh = SimpleNamespace(mesh=torch.arange(2))
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
