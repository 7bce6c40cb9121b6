"""Loader traces of everything that loaders do: copies are found exactly, and nothing else is taken for one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcore.engines.weight_sync.planning.loader_trace import LoaderTrace, is_one_cast, trace_loader
from rlcore.engines.weight_sync.planning.manifest import describe
from rlcore.engines.weight_sync.planning.plan import SyncPlan, make_plan
from rlcore.errors import SyncError
from rlcore.kernels.strided_copy.op import StridedCopies, StridedPiece
from rlcore.nn import WeightView

Load = Callable[["Model", Tensor], Any]
"""Loads the weight ``w`` [6, 4] into ``model.a.p`` [6, 4]; ``model.b.p`` [4] has a plain loader."""


class Model(nn.Module):
    def __init__(self, load: Load, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.load = load
        self.a, self.b = nn.Module(), nn.Module()
        self.a.p = nn.Parameter(torch.full((6, 4), 7.0, dtype=dtype), requires_grad=False)
        self.b.p = nn.Parameter(torch.full((4,), 7.0), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name == "w":
                self.load(self, weight)
            else:
                self.b.p.data.copy_(weight)


WEIGHTS = {"w": torch.randn(6, 4), "v": torch.randn(4)}


def traced(load: Load, *, dtype: torch.dtype = torch.float32) -> LoaderTrace:
    views = [WeightView(name, tensor, tensor.to("meta")) for name, tensor in WEIGHTS.items()]
    with torch.device("meta"):
        model = Model(load, dtype)
    return trace_loader(model, model.load_weights, describe(views, 1).manifest)


def carried_out(plan: SyncPlan, dtype: torch.dtype) -> dict[str, Tensor]:
    live = {name: torch.full_like(p, 5.0) for name, p in Model(lambda *_: None, dtype).named_parameters()}
    plan.fill(live)
    pieces = [StridedPiece(piece.parameter, piece.destination, *piece.copy) for piece in plan.pieces]
    StridedCopies(pieces, list(WEIGHTS.values()), [live[one.name] for one in plan.destinations]).run()
    return live


# ----------------------------------------------------------------------------------------------------- copies


def _columns(model: Model, w: Tensor) -> None:
    for column in range(4):
        model.a.p.data.select(1, 3 - column).copy_(w[:, column])


def _padded(model: Model, w: Tensor) -> None:
    model.a.p.data.zero_()
    model.a.p.data[:4].copy_(w[2:])


def _in_parts(model: Model, w: Tensor) -> None:
    model.a.p[:3] = w[3:]
    model.a.p[3:, ::2] = w[:3, :2]
    model.a.p[3:, 1::2] = w[:3, 2:]


def _through_a_copy_of_its_own(model: Model, w: Tensor) -> None:
    model.a.p.data.copy_(w)
    model.a.p.data.copy_(model.a.p.flatten().clone().view(4, 6).t())


def _twice(model: Model, w: Tensor) -> None:
    model.a.p.data.copy_(w)
    model.a.p.data[2:4].copy_(w[:2])


def _through_another(model: Model, w: Tensor) -> None:
    held = torch.empty(4, 6, device=w.device)
    held.copy_(w.t())
    model.a.p.data.copy_(held.t())


def _zeroed(model: Model, w: Tensor) -> None:
    w[2:4].zero_()
    model.a.p.data.copy_(w)


def _scaled_in_place(model: Model, w: Tensor) -> None:
    w.mul_(2)
    model.a.p.data.copy_(w)


PLAIN: dict[str, Load] = {
    "the weight itself is zeroed": _zeroed,
    "a copy": lambda m, w: m.a.p.data.copy_(w),
    "a setitem": _in_parts,
    "transposed in memory": lambda m, w: m.a.p.data.view(4, 6).copy_(w.t()),
    "a transpose made contiguous": lambda m, w: m.a.p.data.view(4, 6).copy_(w.t().contiguous()),
    "joined": lambda m, w: m.a.p.data.copy_(torch.cat([w[3:], w[:3]])),
    "joined along columns": lambda m, w: m.a.p.data.copy_(torch.cat([w[:, 1:], w[:, :1]], dim=1)),
    "stacked": lambda m, w: m.a.p.data.copy_(torch.stack([w[i] for i in (5, 3, 1, 0, 2, 4)])),
    "columns one by one": _columns,
    "cast and back": lambda m, w: m.a.p.data.copy_(w.double()),
    "cast": lambda m, w: m.a.p.data.copy_(w.to(m.a.p.dtype)),
    "moved to a device": lambda m, w: m.a.p.data.copy_(w.to("cpu", torch.float64)),
    "padded, zeros first": _padded,
    "through a copy of its own": _through_a_copy_of_its_own,
    "written twice": _twice,
    "through another tensor": _through_another,
    "broadcast": lambda m, w: m.a.p.data.copy_(w[1]),
    "chunks": lambda m, w: [own.copy_(one) for own, one in zip(m.a.p.data.chunk(3), w.chunk(3), strict=True)],
    "zeros joined": lambda m, w: m.a.p.data.copy_(torch.cat([w[:4], torch.zeros(2, 4, device=w.device)])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", PLAIN)
def test_it_is_a_copy(what: str, dtype: torch.dtype) -> None:
    trace = traced(PLAIN[what], dtype=dtype)
    assert [one.reason for one in trace.not_plain] == []
    model = Model(PLAIN[what], dtype)
    model.load_weights((name, tensor.clone()) for name, tensor in WEIGHTS.items())
    live = carried_out(make_plan(trace), dtype)
    for name, parameter in model.named_parameters():
        assert torch.equal(live[name], parameter), name


# --------------------------------------------------------------------------------------------------- no copies


def _composed(model: Model, w: Tensor) -> None:
    model.a.p.data.copy_(w)
    model.a.p.data.copy_(-torch.exp(model.a.p.float()))


def _data_is_set(model: Model, w: Tensor) -> None:
    model.a.p.data = w.clone()


def _parameter_is_set(model: Model, w: Tensor) -> None:
    model.a.p = nn.Parameter(w, requires_grad=False)


def _parameter_is_deleted(model: Model, w: Tensor) -> None:
    del model.a.p


def _by_index(model: Model, w: Tensor) -> None:
    model.a.p[torch.tensor([0, 1, 2, 3, 4, 5])] = w


def _fails_at_the_end(model: Model, w: Tensor) -> None:
    model.a.p.data.copy_(w)
    raise ValueError("a loader's own error")


def _bytes(model: Model, w: Tensor) -> None:
    model.a.p.data.view(torch.int32).copy_(w.view(torch.int32))


def _added(model: Model, w: Tensor) -> None:
    model.a.p.data.zero_()
    model.a.p.data.add_(w)


NOT_PLAIN: dict[str, tuple[Load, str]] = {
    "changed after a plain copy": (_composed, "aten.neg.default made it"),
    "scaled": (lambda m, w: m.a.p.data.copy_(w * 2), "aten.mul.Tensor made it"),
    "added": (_added, "aten.add_.Tensor made it"),
    "the weight itself is scaled": (_scaled_in_place, "aten.mul_.Tensor made it"),
    "an operator that writes": (lambda m, w: torch.mul(w, 2, out=m.a.p.data), "aten.mul.out made it"),
    ".data is set": (_data_is_set, "its loader puts another tensor in its place"),
    "another parameter": (_parameter_is_set, "its loader puts another tensor in its place"),
    "taken away": (_parameter_is_deleted, "its loader takes it away"),
    ".item()": (lambda m, w: m.a.p.data.fill_(w[0, 0].item()), "no weight reached it, and its loader raised "),
    "numpy": (lambda m, w: m.a.p.data.copy_(torch.from_numpy(w.numpy())), "no weight reached it, and its loader "),
    "an index": (_by_index, "aten.index_put_.default made it"),
    "an error behind the copy": (_fails_at_the_end, "its loader raised ValueError: a loader's own error"),
    "half of it": (lambda m, w: m.a.p.data[:3].copy_(w[:3]), "12 of its 24 elements are written by no weight"),
    "rounded on the way": (lambda m, w: m.a.p.data.copy_(w.half()), "it is rounded on the way: float32 to float16"),
    "other bytes": (_bytes, "it is written as int32"),
    "no weight": (lambda m, w: m.a.p.data.copy_(torch.ones(6, 4)), "it comes from a tensor that is no weight"),
    "a norm": (lambda m, w: m.a.p.data.copy_(w / w.norm()), "aten.div.Tensor made it"),
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_it_is_no_copy(what: str) -> None:
    load, reason = NOT_PLAIN[what]
    trace = traced(load)
    (found,) = trace.not_plain
    assert found.destination.name == "a.p" and found.reason.startswith(reason)
    plan = make_plan(trace)
    assert [one.name for one in plan.destinations] == ["b.p"]  # what comes behind it is loaded all the same
    given = {trace.manifest.weights[number].name for number in plan.fallback_weights}
    reached = what not in ("no weight", "taken away")
    assert given == ({"w"} if reached else set())
    assert bool(trace.refusal) == (what == "an error behind the copy"), "others need values, or do well without"
    assert plan.fallback_bytes == (6 * 4 * 4 if reached else 0)


def test_a_weight_that_the_trainer_computes_falls_back() -> None:
    views = [WeightView("w", None, torch.empty(6, 4, device="meta")), WeightView("v", torch.empty(4), torch.empty(4))]
    with torch.device("meta"):
        model = Model(PLAIN["a copy"])
    trace = trace_loader(model, model.load_weights, describe(views, 1).manifest)
    plan = make_plan(trace)
    assert [(one.destination.name, one.reason) for one in plan.fallback] == [("a.p", "the trainer computes it")]
    assert plan.fallback_weights == (0,)


def test_a_loader_that_takes_all_weights_first_is_traced() -> None:
    model = Model(PLAIN["a copy"])
    trace = trace_loader(
        model.to("meta"),
        lambda weights: model.load_weights(dict(weights).items()),
        describe([WeightView(name, tensor, tensor.to("meta")) for name, tensor in WEIGHTS.items()], 1).manifest,
    )
    assert len(trace.written) == 2


def test_a_loader_that_fails_with_all_weights_taken_loses_them_all() -> None:
    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        dict(weights)
        raise KeyError("w")

    views = [WeightView(name, tensor, tensor.to("meta")) for name, tensor in WEIGHTS.items()]
    with torch.device("meta"):
        trace = trace_loader(Model(PLAIN["a copy"]), load, describe(views, 1).manifest)
    plan = make_plan(trace)
    assert not plan.destinations and plan.fallback_weights == (0, 1)
    assert plan.fallback[0].reason == "no weight reached it, and its loader raised KeyError: 'w'"


def test_a_loader_that_fails_for_everything_is_not_asked_forever() -> None:
    calls = []

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        calls.append(next(iter(weights)))
        raise KeyError("no such name")

    tensor = torch.empty(1, device="meta")
    views = [WeightView(f"w{number}", tensor, tensor) for number in range(2000)]
    trace = trace_loader(nn.Linear(1, 1, device="meta"), load, describe(views, 1).manifest)
    assert len(calls) < 300
    assert len(make_plan(trace).fallback_weights) == 2000


def test_the_loaders_own_refusal_of_a_model_is_raised() -> None:
    def refuse(weights: Iterable[tuple[str, Tensor]]) -> None:
        raise SyncError("these are another model's")

    with pytest.raises(SyncError, match="another model's"):
        trace_loader(nn.Linear(1, 1, device="meta"), refuse, describe([], 1).manifest)


def _wants_other_rows(model: Model, w: Tensor) -> None:
    model.a.p.data[:3].copy_(w)


def _asks_for_values_and_fails(model: Model, w: Tensor) -> None:
    if w.is_meta:
        raise RuntimeError("cannot be called on meta tensors")
    raise ValueError("never of these")


def _fails_on_meta_alone(model: Model, w: Tensor) -> None:
    model.a.p.data.copy_(w)
    if w.is_meta:
        raise ValueError("no pointer")


REFUSED: dict[str, tuple[Load, str]] = {
    "another name": (lambda m, w: {}["w"], r"its loader raised KeyError: 'w', for the weight 'w' of shape \[6, 4\]"),
    "another shape": (_wants_other_rows, r"its loader raised RuntimeError: .*3.*6.* for the weight 'w'"),
    "none for a parameter": (lambda m, w: None, r"^no weight reaches 'a.p'$"),
    "values are wanted": (_asks_for_values_and_fails, "^$"),
    "a place is wanted": (_fails_on_meta_alone, "^$"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_weights_of_another_model(what: str) -> None:
    load, refusal = REFUSED[what]
    assert re.search(refusal, traced(load).refusal)


@pytest.mark.parametrize(
    ("live", "refusal"),
    [(None, "no weight reaches 'k_scale'"), ({"weight"}, "")],
    ids=["all are live", "one is dropped"],
)
def test_nobody_misses_a_weight_for_what_the_engine_drops_after_loading(live: set[str] | None, refusal: str) -> None:
    model = nn.Linear(4, 1, bias=False, device="meta")
    model.k_scale = nn.Parameter(torch.empty((), device="meta"))
    tensor = torch.empty(1, 4, device="meta")
    trace = trace_loader(
        model,
        lambda weights: [model.weight.data.copy_(weight) for _, weight in weights],
        describe([WeightView("weight", tensor, tensor)], 1).manifest,
        live,
    )
    assert trace.refusal == refusal


def test_names_of_one_memory_are_one_destination() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4, device="meta"), nn.Linear(4, 5, bias=False, device="meta")
            self.head.weight = self.embed.weight
            self.first_rows = nn.Buffer(self.embed.weight.detach()[:2])

    model = Tied()
    tensor = torch.empty(5, 4, device="meta")
    trace = trace_loader(
        model,
        lambda weights: [model.embed.weight.data.copy_(weight) for _, weight in weights],
        describe([WeightView("embed.weight", tensor, tensor)], 1).manifest,
    )
    (written,) = trace.written
    assert written.destination.name == "embed.weight"
    assert set(written.destination.aliases) == {"head.weight", "first_rows"}


def test_parts_of_one_storage_are_destinations_of_their_own() -> None:
    flat = torch.empty(40, device="meta")
    model = nn.Module()
    model.low, model.high = nn.Buffer(flat[:20].view(5, 4)), nn.Buffer(flat[20:].view(4, 5))
    tensor = torch.empty(40, device="meta")
    trace = trace_loader(
        model,
        lambda weights: [flat.copy_(weight) for _, weight in weights],
        describe([WeightView("flat", tensor, tensor)], 1).manifest,
    )
    plan = make_plan(trace)
    assert [(one.name, one.shape) for one in plan.destinations] == [("low", (5, 4)), ("high", (4, 5))]
    assert [(piece.shape, piece.source_offset, piece.offset) for piece in plan.pieces] == [
        ((20,), 0, 0),
        ((20,), 20, 0),
    ]


@pytest.mark.parametrize(
    ("dtypes", "is_one"),
    [
        ((torch.float32, torch.bfloat16), True),
        ((torch.bfloat16, torch.float32, torch.bfloat16), True),
        ((torch.bfloat16, torch.float32, torch.float16), True),
        ((torch.float32, torch.bfloat16, torch.float32, torch.bfloat16), True),
        ((torch.float32, torch.bfloat16, torch.float32), False),
        ((torch.float32, torch.float16, torch.bfloat16), False),
        ((torch.float16, torch.bfloat16, torch.float32), False),
        ((torch.int64, torch.float32, torch.bfloat16), False),
    ],
    ids=str,
)
def test_casts_that_are_one(dtypes: tuple[torch.dtype, ...], is_one: bool) -> None:
    assert is_one_cast(dtypes) is is_one
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtypes[0])
    stepwise = values
    for dtype in dtypes[1:]:
        stepwise = stepwise.to(dtype)
    if is_one:
        assert torch.equal(stepwise, values.to(dtypes[-1]))
