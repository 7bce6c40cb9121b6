"""Plans of fused, parallel models, against the model's own loader run on the whole tensors."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
import torch
from fused_model import FusedModel, Share, Sizes, meta, names
from torch import Tensor

from rlcore.engines.weight_sync.planning import loader_trace
from rlcore.engines.weight_sync.planning import plan as plans
from rlcore.engines.weight_sync.planning.loader_trace import LoaderTrace, trace_loader
from rlcore.engines.weight_sync.planning.manifest import WeightManifest, describe
from rlcore.engines.weight_sync.planning.plan import SyncPlan, make_plan, misfits
from rlcore.engines.weight_sync.planning.self_test import checksums, made, made_weights, poison, run_self_test
from rlcore.errors import SyncError
from rlcore.kernels.strided_copy.op import StridedCopies, StridedPiece
from rlcore.nn import WeightView
from rlcore.weights.shards import Bounds
from tests.counts import Counts, assert_at_most

GRIDS = [
    Share(),
    *(Share(size=2, rank=rank) for rank in range(2)),
    *(Share(size=4, rank=rank) for rank in range(4)),  # more workers than key heads
    *(Share(size=2, rank=rank, splits_experts=True) for rank in range(2)),
]


def views(sizes: Sizes, dtype: torch.dtype, *, is_packed: bool = False) -> Iterator[WeightView]:
    """Yield each weight as a parameter; packed, the experts of a layer are views of two, as in transformers."""
    packed: dict[str, Tensor] = {}
    for name, shape in names(sizes):
        path = name.split(".")
        if is_packed and "experts" in path:
            layer, expert, part = path[1], int(path[3]), path[4]
            rows = (sizes.H, sizes.I) if part == "down" else (2 * sizes.I, sizes.H)
            key = f"{layer}.{'down' if part == 'down' else 'gate_up'}"
            whole = packed.setdefault(key, torch.empty(sizes.E, *rows, dtype=dtype, device="meta"))
            view = whole[expert]
            if part != "down":
                view = view[: sizes.I] if part == "gate" else view[sizes.I :]
            yield WeightView(name, whole, view)
        else:
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            yield WeightView(name, tensor, tensor)


def sharded(manifest: WeightManifest, rng: random.Random, num_ranks: int, replicas: int = 1) -> WeightManifest:
    """The same weights, with rows dealt out at random: uneven, and some ranks with none."""

    def dealt(size: int) -> tuple[Bounds, ...]:
        edges = sorted(rng.randint(0, size) for _ in range(num_ranks - 1))
        rows = list(zip([0, *edges], [*edges, size], strict=True))
        return tuple(rows * replicas)

    layouts = tuple(dealt(layout[0][1]) for layout in manifest.layouts)
    return msgspec.structs.replace(manifest, num_ranks=num_ranks * replicas, layouts=layouts)


def parameters_of(manifest: WeightManifest, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Whole, put together from the weights that are views of them."""
    found = [torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in manifest.parameters]
    for weight in manifest.weights:
        assert weight.parameter is not None
        found[weight.parameter].as_strided(weight.shape, weight.stride, weight.offset).copy_(weights[weight.name])
    return found


def carry_out(plan: SyncPlan, manifest: WeightManifest, parameters: list[Tensor], live: Mapping[str, Tensor]) -> None:
    """Carry a plan out from the part of each rank, which is in memory of its own."""
    parts: dict[tuple[int, int], int] = {}
    held: list[Tensor] = []
    for index, (tensor, described) in enumerate(zip(parameters, manifest.parameters, strict=True)):
        for rank, (first, end) in enumerate(manifest.layouts[described.layout]):
            parts[rank, index] = len(held)
            held.append(tensor[first:end].clone() if tensor.dim() else tensor.clone())
    pieces = [StridedPiece(parts[one.rank, one.parameter], one.destination, *one.copy) for one in plan.pieces]
    plan.fill(live)
    StridedCopies(pieces, held, [live[one.name] for one in plan.destinations]).run()


def golden(sizes: Sizes, share: Share, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    model = FusedModel(sizes, share)
    with torch.no_grad():
        model.load_weights(weights.items())
    return dict(model.named_parameters())


def live_of(sizes: Sizes, share: Share) -> dict[str, Tensor]:
    live = {name: parameter.detach() for name, parameter in FusedModel(sizes, share).named_parameters()}
    poison(live.values(), 0)
    return live


def traced(sizes: Sizes, share: Share, manifest: WeightManifest) -> LoaderTrace:
    model = meta(sizes, share)
    return trace_loader(model, model.load_weights, manifest)


@pytest.mark.parametrize("share", GRIDS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_writes_what_the_loader_writes(share: Share, seed: int) -> None:
    rng = random.Random(seed)
    trainer, engine = rng.choice([(torch.float32, torch.float32), (torch.float32, torch.bfloat16)] * 2)
    sizes = Sizes(V=rng.choice([11, 16, 5]), is_tied=rng.random() < 0.5, dtype=engine)
    manifest = describe(views(sizes, trainer, is_packed=rng.random() < 0.5), 1).manifest
    manifest = sharded(manifest, rng, rng.randint(1, 5), rng.choice([1, 1, 2]))
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator, dtype=trainer) for name, shape in names(sizes)}

    plan = make_plan(traced(sizes, share, manifest), spread=rng.randrange(3))

    assert not plan.fallback and not plan.fallback_weights and not plan.fallback_bytes
    assert [one.name for one in plan.untouched] == ["cache"]
    live = live_of(sizes, share)
    carry_out(plan, manifest, parameters_of(manifest, weights), live)
    want = golden(sizes, share, weights)
    assert live.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(live[name], tensor), name
    filled = sum(torch.Size(one.shape).numel() for one in plan.fills)
    written = sum(tensor.numel() for tensor in want.values())
    assert plan.needed_bytes == (written - filled) * trainer.itemsize  # nothing is read twice


def test_packed_experts_are_one_piece_a_rank() -> None:
    sizes = Sizes(layers=1)
    manifest = describe(views(sizes, torch.float32, is_packed=True), 1).manifest
    plan = make_plan(traced(sizes, Share(), manifest))
    stacks = [plan.destinations[piece.destination].name for piece in plan.pieces]
    assert stacks.count("layers.0.experts.w13") == stacks.count("layers.0.experts.w2") == 1


def test_replicas_are_read_on_the_own_device_then_on_the_own_host_else_spread() -> None:
    sizes = Sizes()
    manifest = sharded(describe(views(sizes, torch.float32), 1).manifest, random.Random(0), 2, replicas=3)
    trace = traced(sizes, Share(), manifest)
    own = {piece.rank for piece in make_plan(trace, distances=(1, 1, 0, 0, 2, 2)).pieces}
    assert own == {2, 3}
    of_own_host = {piece.rank for piece in make_plan(trace, distances=(2, 2, 1, 1, 1, 1)).pieces}
    assert of_own_host == {2, 3, 4, 5}
    farthest = {piece.rank for piece in make_plan(trace, distances=(2, 0, 2, 2, 2, 2)).pieces}
    assert 1 in farthest and len(farthest) > 1, "the other half of the rows is on another host alone"
    spread = [piece.rank for piece in make_plan(trace).pieces]
    assert set(spread) == set(range(6))
    assert [piece.rank for piece in make_plan(trace, spread=1).pieces] != spread


# ------------------------------------------------------------------------------------------------------- digests


def test_ranks_that_plan_alike_have_equal_digests() -> None:
    sizes = Sizes()
    one, other = (describe(views(sizes, torch.bfloat16), 4).manifest for _ in range(2))
    assert one.digest == other.digest == WeightManifest.from_bytes(one.to_bytes()).digest
    plans = [make_plan(traced(sizes, Share(size=2, rank=1), manifest)) for manifest in (one, other)]
    assert plans[0].digest == plans[1].digest == SyncPlan.from_bytes(plans[0].to_bytes()).digest
    assert SyncPlan.from_bytes(plans[0].to_bytes()) == plans[1]
    assert make_plan(traced(sizes, Share(size=2), one)).digest != plans[0].digest


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"num_ranks": "2"})])
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(SyncError, match=f"^these {len(data)} bytes are no Manifest of a weight sync: "):
        WeightManifest.from_bytes(data)


def test_tensors_of_another_share_are_told_from_those_of_the_trace() -> None:
    sizes = Sizes()
    manifest = describe(views(sizes, torch.float32), 2).manifest
    plan = make_plan(traced(sizes, Share(), manifest))
    assert misfits(plan.destinations, live_of(sizes, Share())) == {}
    wrong = misfits(plan.destinations, live_of(sizes, Share(size=2, rank=1)))
    assert any(
        reason.startswith("it is float32 [8, 8] with strides [8, 1] in the engine and float32 [12, 8] with")
        for reason in wrong.values()
    )


def test_live_tensors_that_differ_from_the_trace_fall_back() -> None:
    sizes = Sizes()
    manifest = describe(views(sizes, torch.float32), 1).manifest
    trace = traced(sizes, Share(), manifest)
    live = live_of(sizes, Share())
    del live["norm.weight"]
    live["layers.0.experts.w2"] = live["layers.0.experts.w2"].transpose(1, 2)
    live["head.weight"] = live["embed.weight"]
    wrong = misfits([one.destination for one in trace.written], live)
    assert wrong.keys() == {"norm.weight", "layers.0.experts.w2", "head.weight", "embed.weight"}
    assert wrong["norm.weight"] == "the engine has no such tensor"
    assert wrong["head.weight"] == "embed.weight and head.weight are one memory in the engine and two in its loader"
    plan = make_plan(trace, excluded=wrong)
    fallen = {one.destination.name: one.reason for one in plan.fallback}
    # what is loaded together falls back together
    assert fallen.keys() == {*wrong, "layers.0.experts.w13"}
    assert fallen["layers.0.experts.w13"] == "it is loaded together with layers.0.experts.w2, which is not plain"
    given = {manifest.weights[number].name for number in plan.fallback_weights}
    assert given >= {"norm.weight", "head.weight", "embed.weight", "layers.0.experts.0.up.weight"}
    assert plan.fallback_bytes == sum(manifest.weights[number].nbytes for number in plan.fallback_weights)


def test_rows_that_no_rank_holds_are_an_error() -> None:
    sizes = Sizes()
    manifest = describe(views(sizes, torch.float32), 1).manifest
    short = tuple(((0, layout[0][1] - 1),) for layout in manifest.layouts)
    manifest = msgspec.structs.replace(manifest, layouts=short)
    with pytest.raises(SyncError, match=r"^no trainer rank holds \d+ elements of a parameter of shape "):
        make_plan(traced(sizes, Share(), manifest))


# ------------------------------------------------------------------------------------------------------- self-test


class Engine:
    """A live model whose load may do more than its loader."""

    def __init__(self, sizes: Sizes, share: Share) -> None:
        self.model = FusedModel(sizes, share)

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.model.load_weights(weights)


class Shuffling(Engine):
    """Its kernels want the halves of gate and up the other way round."""

    def reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        super().reload(weights)
        w13 = self.model.layers[1].experts.w13
        w13.copy_(w13.roll(w13.shape[1] // 2, 1))


class Growing(Engine):
    """Has another tensor after a load."""

    def reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        super().reload(weights)
        self.model.norm.weight = torch.nn.Parameter(self.model.norm.weight.double(), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", GRIDS[::3], ids=str)
def test_a_plan_is_proven_on_values_made_for_it(share: Share, dtype: torch.dtype) -> None:
    sizes = Sizes(dtype=dtype)
    manifest = sharded(describe(views(sizes, torch.float32), 1).manifest, random.Random(3), 3)
    plan = make_plan(traced(sizes, share, manifest))
    engine = Engine(sizes, share)
    assert run_self_test(plan, manifest, engine.tensors, engine.reload) == {}
    want = golden(sizes, share, dict(made_weights(manifest, torch.device("cpu"))))
    assert all(torch.equal(engine.tensors()[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        (Shuffling, "layers.1.experts.w13", "the engine's own load leaves other values in it than its loader copied"),
        (Growing, "norm.weight", "after a load, it is float64 "),
    ],
)
def test_what_the_proof_finds_is_left_to_the_loader(kind: type[Engine], name: str, reason: str) -> None:
    sizes = Sizes()
    manifest = describe(views(sizes, torch.float32), 1).manifest
    trace = traced(sizes, Share(), manifest)
    engine = kind(sizes, Share())
    wrong = run_self_test(make_plan(trace), manifest, engine.tensors, engine.reload)
    assert list(wrong) == [name] and wrong[name].startswith(reason)
    plan = make_plan(trace, excluded=wrong)
    assert name in {one.destination.name for one in plan.fallback}
    assert run_self_test(plan, manifest, engine.tensors, engine.reload) == {}


def test_no_garbage_is_collected_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the collector would look at all objects of an engine, of which there are millions."""
    seen: dict[str, bool] = {}

    def noting(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (seen.update({name: gc.isenabled()}), work(*args))[1]

    monkeypatch.setattr(plans, "coalesce", noting("plan", plans.coalesce))
    monkeypatch.setattr(loader_trace, "visible", noting("reading", loader_trace.visible))
    model, manifest = meta(Sizes(), Share()), describe(views(Sizes(), torch.float32), 1).manifest
    make_plan(trace_loader(model, noting("loader", model.load_weights), manifest))
    assert seen == {"loader": False, "reading": False, "plan": False} and gc.isenabled()


def test_a_self_test_costs_a_few_launches_a_tensor_and_a_few_passes_over_its_bytes() -> None:
    """Values are drawn in one launch a parameter, for the load and for the plan; sums take three launches a tensor.

    What the loader and the plan's copies launch is left out, and so are the bytes that these read and write.
    """
    sizes = Sizes(E=32)
    manifest = describe(views(sizes, torch.bfloat16, is_packed=True), 1).manifest
    plan = make_plan(traced(sizes, Share(), manifest))
    engine = Engine(sizes, Share())
    counts = Counts()
    with counts:
        assert run_self_test(plan, manifest, engine.tensors, engine.reload) == {}
    del counts.launches["copy_"]
    parameters, tensors = len(manifest.parameters), len(plan.destinations)
    assert counts.launches["normal_"] == 2 * parameters, "experts that come by turns are drawn with their stacks"
    nbytes = sum(destination.nbytes for destination in plan.destinations)
    assert_at_most(
        counts, launches=2 * parameters + 9 * tensors + 10, waits=0, bytes=39 * nbytes
    )  # on a host bfloat16 is drawn in float32


def test_a_wrong_plan_does_not_pass() -> None:
    sizes = Sizes()
    manifest = describe(views(sizes, torch.float32), 1).manifest
    plan = make_plan(traced(sizes, Share(), manifest))
    first = plan.pieces[0]
    wrong = msgspec.structs.replace(first, source_offset=1, shape=(first.shape[0] - 1,))
    plan = msgspec.structs.replace(plan, pieces=(wrong, *plan.pieces[1:]))
    engine = Engine(sizes, Share())
    assert list(run_self_test(plan, manifest, engine.tensors, engine.reload)) == [
        plan.destinations[first.destination].name
    ]


@pytest.mark.parametrize(
    ("dtype", "distinct"),
    [("float32", 4990), ("bfloat16", 300), ("float8_e4m3fn", 60), ("int64", 64), ("uint8", 64), ("bool", 2)],
)
def test_made_values_are_unlike_each_other_and_the_same_again(dtype: str, distinct: int) -> None:
    one, again, other = (made(number, 5000, dtype, torch.device("cpu")).double() for number in (0, 0, 1))
    assert torch.equal(one, again)
    assert one.unique().numel() >= distinct and one.abs().max() <= (2 if "float" in dtype else 63)
    assert one.mean().abs() < 0.1 or "float" not in dtype
    assert not torch.equal(one, other) and not torch.equal(one[:1000], one[1000:2000])


def test_a_sum_does_not_depend_on_where_a_tensor_begins() -> None:
    """Words of 4 bytes are summed, and parts of a tensor in bfloat16 may begin between two of them."""
    memory = torch.randn(41).bfloat16()
    assert checksums([memory[1:].clone(), memory[1:]]) == checksums([memory[1:]]) * 2
    assert checksums([memory[1:]]) != checksums([memory[:-1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8], ids=str)
def test_a_sum_changes_with_every_element_and_with_their_order(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcore.engines.weight_sync.planning import self_test

    monkeypatch.setattr(self_test, "_CHUNK", 16)
    tensor = torch.arange(40).to(dtype).view(5, 8)
    (want,) = checksums([tensor])
    assert checksums([tensor.t().contiguous().t()]) == [want]
    for place in range(40):
        other = tensor.clone().view(-1)
        other[place] += 1
        assert checksums([other.view(5, 8)]) != [want]
        other = tensor.clone().view(-1)
        other[[place, (place + 17) % 40]] = other[[(place + 17) % 40, place]]
        assert checksums([other.view(5, 8)]) != [want]
