"""Operators over several ranks: a vocabulary split over a group, and weights that are DTensors.

test_heads_on_ranks.py runs this file once for each rank, in processes that meet at a file; pytest does not collect it
by itself. Every rank runs every test, in the same order.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.kernels import vocab_shard
from rlcore.kernels.linear.head import LinearHead
from rlcore.kernels.row_stats import ROW_STATS
from rlcore.ops import combine, entropy_bonus, kl, linear_logprob, linear_loss, ppo_clip, sequence_level
from tests.accuracy import assert_as_accurate, assert_within_rounding
from tests.kernels.plain import assert_equal_in_float64, doubled
from tests.kernels.ranks import CUTS, DEVICE, RANK, SIZE, V, group, world  # noqa: F401  # a fixture

T, H = 70, 12


def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE.type, (SIZE,))


def random_head(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> list[Tensor]:
    """Hidden states, weight, bias; the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((T, H), (V, H), (V,))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def random_targets(*, seed: int = 0) -> Tensor:
    targets = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(seed))
    targets[:3] = torch.tensor([0, V - 1, -100])
    return targets.to(DEVICE)


def parts_of(whole: list[Tensor], cuts: tuple[int, ...]) -> list[Tensor]:
    """This rank's: all hidden states, its rows of weight and bias."""
    rows = slice(cuts[RANK], cuts[RANK + 1])
    hidden, *head = whole
    return [hidden.detach().requires_grad_(), *(x.detach()[rows].clone().requires_grad_() for x in head)]


def combined(scores: tuple[Tensor, Tensor | None]) -> Tensor:
    logprob, entropy = scores
    slope = torch.linspace(-1, 2, len(logprob), dtype=logprob.dtype, device=DEVICE)
    return (slope * logprob).sum() + (0 if entropy is None else (slope.cos() * entropy).sum())


def assert_same(found: Any, expected: Any) -> None:
    """As one process adds it up, in another order."""
    assert_equal_in_float64(found, expected, terms=T + V)


TEMPERATURES = torch.linspace(0.5, 2, T, dtype=torch.float64, device=DEVICE)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "with_entropy": True, "memory_budget_bytes": 3 * V * 8 * 20},
    {"temperature": TEMPERATURES, "softcap": 3.0, "logit_scale": 1.3, "with_entropy": True},
]


SPLITS = {
    **{way: (CUTS[0], options) for way, options in zip(("plain", "entropy", "all"), OPTIONS, strict=True)},
    "entropy, a rank without tokens": (CUTS[1], OPTIONS[1]),
    "all, a rank without tokens": (CUTS[2], OPTIONS[2]),
}
each_split = pytest.mark.parametrize(("cuts", "options"), SPLITS.values(), ids=SPLITS)


# -------------------------------------------------------------------------------------------- a split vocabulary


@pytest.mark.parametrize(  # in float64 whatever is asked for, and rounded where all is
    ("cuts", "options", "dtype"),
    [
        pytest.param(*split, dtype, id=f"{way}-{dtype}")
        for way, split in SPLITS.items()
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        if dtype == torch.float64 or way.startswith("all")
    ],
)
def test_log_probabilities_are_those_of_one_process(
    cuts: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    whole, targets = random_head(dtype), random_targets()
    with torch.no_grad():
        whole[0][2] = math.nan  # an ignored row
    here = parts_of(whole, cuts)

    def results(hidden: Tensor, weight: Tensor, bias: Tensor, **group: Any) -> tuple[list[Tensor], list[Tensor]]:
        way = group or {"implementation": "chunked"}
        scores = linear_logprob(hidden, weight, targets, bias=bias, **way, **options)
        d_hidden, *d_head = torch.autograd.grad(combined(scores), (hidden, weight, bias))
        mine = slice(None) if group else slice(cuts[RANK], cuts[RANK + 1])
        return [x for x in scores if x is not None], [d_hidden, *(x[mine] for x in d_head)]

    found, want = results(*here, group=group()), results(*whole)
    assert not found[1][0][2].any()
    if dtype == torch.float64:
        assert_same(found, want)
        return
    for sides in zip(found, want, results(*doubled(*whole)), strict=True):
        assert_as_accurate(*sides)


@each_split
def test_row_stats_are_those_of_one_process(cuts: tuple[int, ...], options: dict[str, Any]) -> None:
    whole = [x.detach().round().requires_grad_() for x in random_head()]  # so that many logits are equal
    logits = whole[0].detach() @ whole[1].detach().T + whole[2].detach()
    targets = torch.where(torch.arange(T, device=DEVICE) % 2 == 0, logits.argmax(1), random_targets())
    targets[4] = -100

    def found(hidden: Tensor, weight: Tensor, bias: Tensor, **way: Any) -> Mapping[str, Tensor]:
        return linear_logprob(hidden, weight, targets, bias=bias, row_stats=ROW_STATS, **way, **options).row_stats

    here, want = found(*parts_of(whole, cuts), group=group()), found(*whole, implementation="chunked")
    assert torch.equal(here["is_top1"], want["is_top1"]) and 0 < int(want["is_top1"].sum()) < T
    for name in ("sum_squares", "mean_logit"):
        assert_equal_in_float64(here[name], want[name], terms=V + H, what=name)
    assert not any(values.requires_grad or values[4] for values in here.values())


def policy_loss(*, is_sequence_level: bool) -> Any:
    loss_fn = combine(ppo_clip(), kl(coef=0.1), entropy_bonus(coef=0.01))
    return sequence_level(loss_fn) if is_sequence_level else loss_fn


def random_tokens(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(8)
    old, near, advantages, weight = (torch.randn(T, generator=generator).to(DEVICE, dtype) for _ in range(4))
    per_token = {"old_logprobs": old - 5, "ref_logprobs": old - 5 + near * 0.3, "advantages": advantages}
    return {"per_token": per_token, "token_weight": weight.abs() / T, "cu_seqlens": torch.tensor([0, 3, 3, 60, T])}


@pytest.mark.parametrize(
    ("cuts", "options", "is_sequence_level"),
    [
        *(pytest.param(*split, True, id=f"{way}-sequences") for way, split in SPLITS.items()),
        pytest.param(*SPLITS["all"], False, id="all-tokens"),
    ],
)
def test_losses_are_those_of_one_process(
    cuts: tuple[int, ...], options: dict[str, Any], is_sequence_level: bool
) -> None:
    whole, targets, tokens = random_head(), random_targets(), random_tokens()
    here = parts_of(whole, cuts)
    loss_fn = policy_loss(is_sequence_level=is_sequence_level)
    options = {"with_entropy": True} | options
    want = linear_loss(*whole[:2], targets, loss_fn, bias=whole[2], **tokens, **options)
    found = linear_loss(*here[:2], targets, loss_fn, bias=here[2], group=group(), **tokens, **options)
    assert_same(found, want)
    d_hidden, *d_head = torch.autograd.grad(found.loss * 3, here)
    want_hidden, *want_head = torch.autograd.grad(want.loss * 3, whole)
    assert_same([d_hidden, *d_head], [want_hidden, *(x[cuts[RANK] : cuts[RANK + 1]] for x in want_head)])
    with torch.no_grad():
        assert_same(linear_loss(*here[:2], targets, loss_fn, bias=here[2], group=group(), **tokens, **options), want)


EACH = T // SIZE
"""Rows of a rank, where those of the hidden states are split as well."""


@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((options, torch.float64) for options in OPTIONS), (OPTIONS[2], torch.bfloat16)],
    ids=["plain", "entropy", "all", "all, rounded"],
)
def test_hidden_states_may_be_split_by_rows(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Chunks end within a rank's rows, and where they end."""
    (hidden, *head), own = random_head(dtype), slice(RANK * EACH, (RANK + 1) * EACH)
    (_, *here), cuts = parts_of([hidden, *head], CUTS[0]), CUTS[0]
    whole, part = (hidden.detach()[rows].requires_grad_() for rows in (slice(SIZE * EACH), own))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options = {name: x[: SIZE * EACH] if isinstance(x, Tensor) else x for name, x in options.items()}
    per_token, token_weight, _ = random_tokens(wide).values()
    tokens: dict[str, Any] = {
        "per_token": {name: x[: SIZE * EACH] for name, x in per_token.items()},
        "token_weight": token_weight[: SIZE * EACH],
        "cu_seqlens": torch.tensor([0, 3, 60, SIZE * EACH]),
    }
    targets, loss_fn = random_targets()[: SIZE * EACH], policy_loss(is_sequence_level=True)

    def results(hidden: Tensor, head: list[Tensor], group: Any) -> list[Tensor]:
        way: dict[str, Any] = {"bias": head[1], "group": group, "implementation": None if group else "chunked"}
        logprob = linear_logprob(hidden, head[0], targets, **way, **options)
        loss = linear_loss(hidden, head[0], targets, loss_fn, **way, **tokens, **{"with_entropy": True} | options).loss
        d_hidden, *d_head = torch.autograd.grad(combined(logprob) + 3 * loss, [hidden, *head])
        if group is None:
            d_hidden, d_head = d_hidden[own], [x[cuts[RANK] : cuts[RANK + 1]] for x in d_head]
        return [logprob[0], loss, d_hidden, *d_head]

    found, want = results(part, here, group()), results(whole, head, None)
    if dtype == torch.float64:
        assert_same(found, want)
        return
    exact_hidden, *exact_head = doubled(whole, *head)
    exact = results(exact_hidden, exact_head, None)
    assert_as_accurate(found[0], want[0], exact[0])
    assert_as_accurate(found[2:], want[2:], exact[2:])  # gradients; the error of the loss alone is a matter of luck


def test_gradients_of_split_rows_go_to_their_owners_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (hidden, weight, _), targets = parts_of(random_head(), CUTS[0]), random_targets()[: SIZE * EACH]
    part = hidden.detach()[RANK * EACH : (RANK + 1) * EACH].requires_grad_()
    found, sent, reduce = linear_logprob(part, weight, targets, group=group()), [0] * SIZE, dist.reduce

    def counted(rows: Tensor, *, group_dst: int, **options: Any) -> Any:
        sent[group_dst] += len(rows)
        return reduce(rows, group_dst=group_dst, **options)

    monkeypatch.setattr(dist, "reduce", counted)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: pytest.fail("to all"))
    torch.autograd.grad(combined(found), (part, weight))
    assert sent == [EACH] * SIZE


def test_a_part_of_another_length_is_refused() -> None:
    hidden, weight, _ = parts_of(random_head(), CUTS[0])
    message = rf"one token for each row of hidden, or of the equal parts that {SIZE} ranks have = \[11\]; got \[{T}\]"
    with pytest.raises(InvalidInputError, match=message):
        linear_logprob(hidden[:11], weight, random_targets(), group=group())


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_asked_for_are_computed(needs: tuple[bool, bool]) -> None:
    whole, targets = random_head(), random_targets()
    here = [x.requires_grad_(needed) for x, needed in zip(parts_of(whole, CUTS[0]), needs, strict=False)]
    found = linear_logprob(*here, targets, group=group())
    assert found.logprob.requires_grad == any(needs)
    if any(needs):
        want = torch.autograd.grad(combined(linear_logprob(*whole[:2], targets)), whole[:2])
        (got,) = torch.autograd.grad(combined(found), [x for x in here if x.requires_grad])
        assert_same(got, want[0] if needs[0] else want[1][CUTS[0][RANK] : CUTS[0][RANK + 1]])


@pytest.mark.parametrize("num_rows", [0, 5])
def test_no_tokens_or_only_ignored_ones_give_a_differentiable_zero(num_rows: int) -> None:
    here = parts_of(random_head(), CUTS[0])
    hidden = torch.randn(num_rows, H, dtype=torch.float64, device=DEVICE, requires_grad=True)
    targets = torch.full((num_rows,), -100, device=DEVICE)
    logprob, entropy = linear_logprob(hidden, here[1], targets, with_entropy=True, group=group())
    nothing = torch.full((num_rows,), math.nan, dtype=torch.float64, device=DEVICE)
    per_token = dict.fromkeys(("old_logprobs", "ref_logprobs", "advantages"), nothing)
    loss = linear_loss(
        hidden,
        here[1],
        targets,
        policy_loss(is_sequence_level=False),
        per_token=per_token,
        token_weight=torch.ones(num_rows, device=DEVICE),
        group=group(),
    ).loss
    (logprob.sum() + entropy.sum() + loss).backward()
    assert logprob.shape == (num_rows,) and loss == 0 and not logprob.any() and not entropy.any()
    assert hidden.grad.count_nonzero() == 0 and here[1].grad.count_nonzero() == 0


@pytest.mark.parametrize("size, offset", [(80.0, 0.0), (1.0, 1e4), (1.0, -1e4), (0.0, 0.0)])
def test_extreme_logits(size: float, offset: float) -> None:
    hidden, _, bias = random_head(torch.float32)
    generator = torch.Generator().manual_seed(3)
    weight = ((torch.rand(V, H, generator=generator) * 2 - 1) * size).to(DEVICE)
    hidden = torch.nn.functional.one_hot(torch.arange(T) % H, H).float().to(DEVICE)
    with torch.no_grad():
        bias.fill_(offset)
        bias[: CUTS[0][1]] = -math.inf  # all that the first rank has
    targets = random_targets().clamp(min=CUTS[0][1])
    whole = [hidden.requires_grad_(), weight.requires_grad_(), bias]
    here = parts_of(whole, CUTS[0])

    def results(hidden: Tensor, weight: Tensor, bias: Tensor, **group: Any) -> list[Tensor]:
        way = group or {"implementation": "chunked"}
        scores = linear_logprob(hidden, weight, targets, bias=bias, with_entropy=True, **way)
        d_hidden, d_weight = torch.autograd.grad(combined(scores), (hidden, weight))
        mine = slice(None) if group else slice(CUTS[0][RANK], CUTS[0][RANK + 1])
        return [scores.logprob, scores.entropy, d_hidden, d_weight[mine]]

    sides = results(*here, group=group()), results(*whole), results(*doubled(*whole))
    for found, plain, exact in zip(*sides, strict=True):
        assert_as_accurate(found, plain, exact)


def test_a_bias_that_takes_all_columns_out_gives_nan() -> None:
    hidden, weight, bias = parts_of(random_head(), CUTS[0])
    with torch.no_grad():
        bias.fill_(-math.inf)
    found = linear_logprob(hidden, weight, random_targets(), bias=bias, with_entropy=True, group=group())
    d_hidden, d_weight = torch.autograd.grad(combined(found), (hidden, weight))
    is_counted = random_targets() != -100
    assert all(x.isnan().all() for x in (found.logprob[is_counted], found.entropy[is_counted]))
    assert d_hidden[is_counted].isnan().all() and d_weight.isnan().all()


def test_every_rank_gets_the_same_bits_in_every_run() -> None:
    whole, targets = random_head(), random_targets()
    here = parts_of(whole, CUTS[0])
    runs = []
    for _ in range(2):
        found = linear_logprob(*here[:2], targets, with_entropy=True, group=group())
        runs.append([*found, *torch.autograd.grad(combined(found), here[:2])])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    for mine in runs[0][:3]:  # but for its own rows of the weight
        first = mine.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, mine)


def test_the_forward_gathers_four_numbers_a_row_and_the_backward_sums_while_it_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, targets = parts_of(random_head(), CUTS[0]), random_targets()
    log: list[Any] = []

    class Gather:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        @staticmethod
        def all_gather(parts: list[Tensor], part: Tensor, group: Any) -> None:
            log.append((part.dtype, tuple(part.shape)))
            dist.all_gather(parts, part, group=group)

        @staticmethod
        def all_reduce(x: Tensor, group: Any, async_op: bool) -> Any:
            log.append(("sum", len(x)))
            work = dist.all_reduce(x, group=group, async_op=async_op)

            class Logged:
                @staticmethod
                def wait() -> None:
                    log.append("wait")
                    work.wait()

            return Logged()

    monkeypatch.setattr(vocab_shard, "dist", Gather())
    found = linear_logprob(*here[:2], targets, with_entropy=True, group=group())
    assert log == [(torch.int64, (2,)), (torch.float64, (T, 4))]
    log.clear()
    product = LinearHead.product
    monkeypatch.setattr(
        LinearHead, "product", lambda self, *xs, **out: log.append("product") or product(self, *xs, **out)
    )
    accumulate = LinearHead.accumulate
    monkeypatch.setattr(LinearHead, "accumulate", lambda self, *xs: log.append("product") or accumulate(self, *xs))
    torch.autograd.grad(combined(found), here[:2])
    rows = [entry[1] for entry in log if entry[0] == "sum"]
    assert sum(rows) == T and len(rows) > 1
    chunk = ["product", "product", "sum", "product"]  # logits, hidden states, weight
    assert [entry if isinstance(entry, str) else entry[0] for entry in log] == chunk * len(rows) + ["wait"] * len(rows)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the CPU waits for nothing, and all is checked at once there")
def test_nothing_waits_for_the_device() -> None:
    here, targets, tokens = parts_of(random_head(), CUTS[1]), random_targets(), random_tokens()
    tokens.pop("cu_seqlens")

    def score() -> None:
        found = linear_logprob(*here[:2], targets, bias=here[2], with_entropy=True, group=group())
        loss, _ = linear_loss(*here[:2], targets, policy_loss(is_sequence_level=False), group=group(), **tokens)
        (combined(found) + loss).backward()

    score()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is new
        torch.cuda.set_sync_debug_mode("error")
    try:
        score()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tokens_are_checked_against_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    here, targets = parts_of(random_head(), CUTS[0]), random_targets()
    targets[7] = V
    with pytest.raises(InvalidInputError, match=rf"targets must be token ids in \[0, {V}\) .* got {V} at \[7\]"):
        linear_logprob(*here[:2], targets, group=group())


@pytest.mark.parametrize(
    "change, message",
    [
        ("rows", r"ranks of group must score the same rows; they have \[70, 69"),
        ("budget", r"memory_budget_bytes=\d+ does not hold one row of the logits of every rank of group; this one"),
        ("nothing", r"weight must be \[V, H\] with V > 0 on some rank of group; it is 0 on all"),
        ("mesh", r"group must be a torch.distributed.ProcessGroup .*; got DeviceMesh. .* mesh.get_group\(dim\)"),
        ("dtensor", r"with group= weight must be this rank's rows; got a DTensor: pass weight.to_local\(\)"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(change: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    hidden, weight, _ = parts_of(random_head(), CUTS[0])
    targets, options = random_targets(), {"group": group()}
    if change == "rows" and RANK:
        hidden, targets = hidden[1:], targets[1:]
    elif change == "budget":
        options["memory_budget_bytes"] = 3 * 8 * min(b - a for a, b in zip(CUTS[0], CUTS[0][1:], strict=False))
    elif change == "nothing":
        weight = weight[:0]
    elif change == "mesh":
        options["group"] = mesh()
    elif change == "dtensor":
        weight = DTensor.from_local(weight, mesh(), [Shard(0)], run_check=False)
    with pytest.raises(InvalidInputError, match=message):
        linear_logprob(hidden, weight, targets, **options)


def test_implementations_that_need_the_whole_vocabulary_say_so() -> None:
    here, targets = parts_of(random_head(), CUTS[0]), random_targets()
    with pytest.raises(UnsupportedError, match="chunked: it needs the whole vocabulary on one rank"):
        linear_logprob(*here[:2], targets, group=group(), implementation="chunked")
    with pytest.raises(UnsupportedError, match="vocab_parallel: it is for a vocabulary split over the ranks of group="):
        linear_logprob(*random_head()[:2], targets, implementation="vocab_parallel")


# ---------------------------------------------------------------------------------------------- sharded weights


def summed_over_ranks(gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_the_gradient_of_a_sharded_weight_is_the_ranks_sum_in_its_own_layout(placement: Any) -> None:
    _, weight, bias = random_head()
    hidden, *_ = random_head(seed=1 + RANK)  # each rank has tokens of its own
    targets = random_targets(seed=1 + RANK)
    sharded = distribute_tensor(weight.detach(), mesh(), [placement]).requires_grad_()
    sharded_bias = distribute_tensor(bias.detach(), mesh(), [Replicate()]).requires_grad_()
    with CommDebugMode() as seen:
        found = linear_logprob(hidden, sharded, targets, bias=sharded_bias, with_entropy=True)
    gathers = sum(count for op, count in seen.get_comm_counts().items() if "all_gather" in str(op))
    assert gathers == (0 if placement.is_replicate() else 1)
    inputs = [hidden, sharded, sharded_bias]
    d_hidden, d_weight, d_bias = torch.autograd.grad(combined(found), inputs)
    want = linear_logprob(hidden, weight, targets, bias=bias, with_entropy=True)
    want_hidden, want_weight, want_bias = torch.autograd.grad(combined(want), [hidden, weight, bias])
    assert_same(found, want)
    assert_same(d_hidden, want_hidden)
    assert d_weight.placements == (placement,) and d_bias.placements == (Replicate(),)
    assert d_weight.to_local().shape == sharded.to_local().shape
    assert_same(d_weight.full_tensor(), summed_over_ranks(want_weight))
    assert_same(d_bias.full_tensor(), summed_over_ranks(want_bias))


class Head(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, hidden: Tensor, targets: Tensor, tokens: Mapping[str, Any]) -> Tensor:
        return linear_loss(hidden, self.weight, targets, policy_loss(is_sequence_level=False), **tokens).loss


def test_a_weight_that_fsdp_sharded_works_inside_its_forward_and_outside() -> None:
    _, weight, _ = random_head()
    hidden, *_ = random_head(seed=1 + RANK)
    targets, tokens = random_targets(seed=1 + RANK), random_tokens()
    plain = Head(weight)
    loss = plain(hidden, targets, tokens)
    loss.backward()
    want = summed_over_ranks(plain.weight.grad)

    head = fully_shard(Head(weight), mesh=mesh())
    assert isinstance(head.weight, DTensor) and len(head.weight.to_local()) < V
    inside = head(hidden, targets, tokens)
    assert_same(inside, loss)
    inside.backward()
    assert_same(head.weight.grad.full_tensor(), want / SIZE)  # FSDP2 divides by the number of ranks

    head.zero_grad()
    head.set_gradient_divide_factor(1.0)
    head.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
    head(hidden, targets, tokens).backward()
    assert_same(head.weight.grad.full_tensor(), want)

    head.zero_grad()
    outside = linear_loss(hidden, head.weight, targets, policy_loss(is_sequence_level=False), **tokens).loss
    assert_same(outside, loss)
    outside.backward()
    assert head.weight.grad.placements == head.weight.placements
    assert_same(head.weight.grad.full_tensor(), want)
    linear_loss(hidden, head.weight, targets, policy_loss(is_sequence_level=False), **tokens).loss.backward()
    assert_same(head.weight.grad.full_tensor(), 2 * want)


def test_under_autocast_what_is_gathered_is_lowered_and_the_gradient_is_summed_in_the_dtype_of_the_weight() -> None:
    _, weight, _ = random_head(torch.float32)
    hidden, *_ = random_head(torch.float32, seed=1 + RANK)
    targets = random_targets(seed=1 + RANK)
    sharded = distribute_tensor(weight.detach(), mesh(), [Shard(0)]).requires_grad_()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found, want = linear_logprob(hidden, sharded, targets), linear_logprob(hidden, weight, targets)
    assert torch.equal(found.logprob, want.logprob)
    (got,), (true,) = (torch.autograd.grad(combined(x), w) for x, w in ((found, sharded), (want, weight)))
    assert got.dtype == torch.float32
    exact, magnitude = summed_over_ranks(true.double()), summed_over_ranks(true.double().abs())
    assert_within_rounding(got.full_tensor(), exact, terms=SIZE, magnitude=magnitude)


def test_dtensors_that_cannot_be_used_are_refused() -> None:
    hidden, weight, _ = random_head()
    targets = random_targets()
    partial = DTensor.from_local(weight.detach(), mesh(), [Partial()], run_check=False)
    with pytest.raises(
        InvalidInputError, match=r"weight has placements .*Partial.*not summed yet; redistribute it first"
    ):
        linear_logprob(hidden, partial, targets)
    rows = DTensor.from_local(hidden.detach(), mesh(), [Shard(0)], run_check=False)
    with pytest.raises(
        InvalidInputError, match=r"hidden is a DTensor; pass the rows of this rank: hidden.to_local\(\)"
    ):
        linear_logprob(rows, weight, targets)
