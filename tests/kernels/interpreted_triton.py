"""Triton kernels on the CPU, under TRITON_INTERPRET=1, which Triton reads when it is imported.

test_triton.py runs this file in a process of its own; pytest does not collect it by itself.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.linear import tiled as linear_tiled
from rlcore.kernels.linear import triton_tile_gradients, triton_tiles
from rlcore.kernels.linear.loss_in_chunks import LossProblem
from rlcore.kernels.linear.problem import LinearHeadProblem
from rlcore.kernels.row_stats import ROW_STATS
from rlcore.kernels.softmax_rows import ScaledRows
from rlcore.kernels.token import triton_rows
from rlcore.ops import (
    Logprobs,
    combine,
    entropy_bonus,
    kl,
    linear_logprob,
    linear_loss,
    ppo_clip,
    sequence_level,
    token_logprob,
)
from tests.accuracy import assert_as_accurate, assert_within_rounding
from tests.kernels.plain import (
    assert_loss_as_accurate,
    assert_scores_as_accurate,
    doubled,
    linear_scores,
    token_scores,
)
from tests.kernels.test_row_stats import assert_match_float64, whole_numbers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy warns of inf - inf

NO_LOSS = LossProblem(ppo_clip(), None, None)  # type: ignore[arg-type]  # of tokens, none of which is looked at


def random_logits(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(*shape, generator=generator) * 4).to(dtype)
    return logits, torch.randint(0, shape[-1], shape[:-1], generator=generator)


def assert_matches_float64(logits: Tensor, targets: Tensor, **options: Any) -> list[Tensor]:
    """Forward and backward, with different upstream gradients for log-probability and entropy."""
    leaf = logits.detach().requires_grad_()  # of the same strides
    found = token_logprob(leaf, targets, with_entropy=True, implementation="triton", **options)
    return assert_scores_as_accurate(found, functools.partial(token_scores, targets=targets, **options), [leaf])


# smallest, odd, one past a tile of the statistics, one past a block of the gradient
@pytest.mark.parametrize("shape", [(16, 1), (3, 7), (2, 8193), (2, 3, 4097)], ids=str)
def test_rows_match_float64(shape: tuple[int, ...]) -> None:
    assert_matches_float64(*random_logits(*shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_half_precision_are_not_rounded_again(dtype: torch.dtype) -> None:
    assert_matches_float64(*random_logits(3, 300, dtype=dtype))


def test_rows_with_peaks_offsets_and_masked_columns() -> None:
    logits, targets = random_logits(6, 500)
    logits[0] *= 20  # |z| up to about 250
    logits[1] += 1e4
    logits[2] = -3e4
    logits[3, 1::2] = -math.inf
    targets[3] = 0
    logits[4] = -math.inf
    logits[4, 7] = 0.0
    targets[4] = 7
    assert_matches_float64(logits, targets)


def test_rows_with_a_temperature_each_and_a_keep_mask() -> None:
    logits, targets = random_logits(2, 5, 99)
    keep = torch.rand(logits.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    keep.scatter_(-1, targets[..., None], True)
    assert_matches_float64(logits, targets, temperature=torch.linspace(0.5, 2, 10).view(2, 5), keep_mask=keep)


def test_a_target_outside_the_keep_mask_has_no_gradient() -> None:
    targets = torch.tensor([0, 1, 2])
    keep = torch.ones(3, 40, dtype=torch.bool)
    keep[0, 0] = keep[1, 7] = False
    logits = torch.linspace(-1, 1, 120).view(3, 40)
    assert token_logprob(logits, targets, keep_mask=keep, implementation="triton").logprob[0] == -math.inf
    (gradient,) = assert_matches_float64(logits, targets, keep_mask=keep)
    assert not gradient[~keep].any()


@pytest.mark.parametrize("view", ["batch without its last token", "every second column", "transposed"])
def test_rows_of_any_strides(view: str) -> None:
    logits, _ = random_logits(3, 6, 40)
    views = {
        "batch without its last token": logits[:, :-1],
        "every second column": logits[0, :, ::2],
        "transposed": logits[0].T,
    }
    strided = views[view]
    assert_matches_float64(strided, torch.arange(strided[..., 0].numel()).view(strided.shape[:-1]) % strided.shape[-1])


def test_ignored_rows_are_exactly_zero_whatever_they_hold() -> None:
    logits, targets = random_logits(4, 50)
    logits[1], targets[1] = math.nan, -100
    logits.requires_grad_()
    found = token_logprob(logits, targets, with_entropy=True, implementation="triton")
    (found.logprob.sum() + found.entropy.sum()).backward()
    assert found.logprob[1] == 0 and found.entropy[1] == 0 and not logits.grad[1].any()
    assert logits.grad.isfinite().all() and logits.grad[0].any()


def test_a_row_of_minus_infinities_gives_nan_and_so_does_its_gradient() -> None:
    logits, targets = random_logits(4, 50)
    logits[[1, 3]], targets[3] = -math.inf, -100
    logits.requires_grad_()
    found = token_logprob(logits, targets, with_entropy=True, implementation="triton")
    (found.logprob.sum() + found.entropy.sum()).backward()
    for rows in (*found, logits.grad):
        assert rows[1].isnan().all() and rows[[0, 2]].isfinite().all() and not rows[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_stats_of_logits_match_float64(dtype: torch.dtype) -> None:
    logits, targets = random_logits(3, 25, 99, dtype=dtype)
    targets = torch.where(torch.arange(25) % 2 == 0, logits.argmax(-1), targets)
    targets[1, 4], temperature = -100, torch.linspace(0.5, 2, 75).view(3, 25)
    leaf = logits.requires_grad_()
    found = token_logprob(leaf, targets, temperature=temperature, row_stats=ROW_STATS, implementation="triton")
    assert not any(values.requires_grad or values[1, 4] for values in found.row_stats.values())
    is_scored = targets != -100
    scaled = (logits.detach().double() / temperature.double()[..., None])[is_scored]
    assert_match_float64({name: x[is_scored] for name, x in found.row_stats.items()}, scaled, targets[is_scored])
    found.logprob.sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()


@pytest.mark.parametrize("softcap", [None, 24.0])
def test_row_stats_of_hidden_states_match_float64(softcap: float | None) -> None:
    hidden, weight, bias = whole_numbers(70, 9, 301)
    logits = hidden.double() @ weight.double().T + bias.double()
    targets = torch.where(torch.arange(70) % 2 == 0, logits.argmax(1), torch.arange(70))
    found = linear_logprob(
        hidden.requires_grad_(), weight, targets, bias=bias, softcap=softcap, temperature=0.8, row_stats=ROW_STATS,
        implementation="rows",
    )  # fmt: skip
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    assert_match_float64(found.row_stats, capped / 0.8, targets, reach=float(logits.abs().max()) / 0.8)


def test_a_target_that_is_no_token_is_found_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (triton_rows, sys.modules[token_logprob.__module__]):
        monkeypatch.setattr(module, "is_checked_on_device", lambda tensor: True)
    logits, targets = random_logits(3, 50)
    for target, is_token in ((49, True), (-100, True), (50, False), (-1, False), (2**40, False)):
        targets[1] = target
        if is_token:
            token_logprob(logits, targets, implementation="triton")
        else:
            with pytest.raises(InvalidInputError, match=r"targets must be token ids in \[0, 50\), or ignore_index"):
                token_logprob(logits, targets, implementation="triton")


def test_nan_in_a_row_that_counts_is_not_hidden() -> None:
    logits, targets = random_logits(2, 50)
    logits[0, 3] = math.nan
    found = token_logprob(logits, targets, with_entropy=True, implementation="triton")
    assert found.logprob.isnan().tolist() == [True, False] and found.entropy.isnan().tolist() == [True, False]


def test_backward_in_place_overwrites_the_logits() -> None:
    logits, targets = random_logits(3, 60)
    leaf = logits.requires_grad_()
    gradients = []
    for inplace in (False, True):
        scaled = leaf * 1.0
        token_logprob(scaled, targets, inplace_backward=inplace, implementation="triton").logprob.sum().backward()
        gradients.append(leaf.grad.clone())
        leaf.grad = None
    assert torch.equal(*gradients) and torch.equal(scaled, gradients[1])


def test_rows_of_nothing() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    found = token_logprob(logits, torch.zeros(0, dtype=torch.long), with_entropy=True, implementation="triton")
    found.logprob.sum().backward()
    assert found.logprob.shape == (0,) and found.entropy.shape == (0,) and logits.grad.shape == (0, 5)


def test_float64_is_refused_with_the_reason() -> None:
    refused = dict(choose("token_logprob", Query("cpu", torch.float64, 0, 10)).refused)
    assert refused["triton"] == "it computes in float32, and the inputs are float64"


# ------------------------------------------------------------------------------------------------- tiles
# In float32: the interpreter multiplies no bfloat16. It also rounds to bfloat16 by dropping bits: those of the gradient
# of the logits. That of the reference drops the same.

T, H, V = 150, 40, 700  # two tiles of rows and three of columns, each with an edge
TWICE = 2.0
"""Where both drop the same bits, the other errors are far less."""


def dropped(gradient: Tensor) -> Tensor:
    """As the interpreter stores bfloat16."""
    return gradient.contiguous().view(torch.int32).bitwise_and(-(2**16)).view(torch.float32)


def head_inputs() -> tuple[list[Tensor], Tensor, Tensor]:
    """hidden, weight and bias; targets with an ignored row that holds NaN; a temperature for each row."""
    generator = torch.Generator().manual_seed(6)
    hidden, weight, bias = (torch.randn(shape, generator=generator) * 0.5 for shape in ((T, H), (V, H), (V,)))
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[0], targets[1], targets[2] = 0, V - 1, -100
    hidden[2] = math.nan
    return [hidden, weight, bias], targets, torch.linspace(0.5, 2.0, T)


def random_tokens(num_rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    old, ref, advantages = torch.randn(3, num_rows, generator=generator)
    per_token = {"old_logprobs": old * 0.1 - 7, "ref_logprobs": ref * 0.1 - 7, "advantages": advantages}
    return {"per_token": per_token, "token_weight": torch.linspace(0, 2 / num_rows, num_rows)}


@pytest.fixture
def _tiles_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under the interpreter tiles are refused, as it gets products of bfloat16 wrong; these tests are in float32."""
    monkeypatch.setattr("rlcore.kernels.triton_target.tiled_refusal", lambda query: None)
    monkeypatch.setattr(linear_tiled, "rows_of_a_wave", lambda num_columns, device: 64)
    choose.cache_clear()
    yield
    choose.cache_clear()


def test_the_interpreter_leaves_bfloat16_to_rows() -> None:
    hidden, weight, targets = torch.randn(16, 8).bfloat16(), torch.randn(11, 8).bfloat16(), torch.randint(0, 11, (16,))
    found = linear_logprob(hidden, weight, targets).logprob
    plain, exact = (
        linear_scores(hidden.to(x), weight.to(x), targets=targets)[0] for x in (torch.float32, torch.float64)
    )
    assert_as_accurate(found, plain, exact)
    with pytest.raises(UnsupportedError, match="interpreter gets products of bfloat16 wrong"):
        linear_logprob(hidden, weight, targets, implementation="tiled")


def scored_in_tiles(*inputs: Tensor, **options: object) -> Logprobs:
    return linear_logprob(*inputs, with_entropy=True, implementation="tiled", **options)


def assert_sum_as_accurate(total: Tensor, leaves: Sequence[Tensor], targets: Tensor) -> None:
    """The gradients of the sum of all log-probabilities, with a minus."""
    sides = [torch.autograd.grad(total, leaves, retain_graph=True)]
    for inputs, rounded in ((leaves, dropped), (doubled(*leaves), None)):
        logprob, _ = linear_scores(*inputs, targets=targets, rounded=rounded)
        sides.append(torch.autograd.grad(-logprob.sum(), inputs))
    assert_as_accurate(*sides, factor=TWICE)


def assert_tiles_as_accurate(
    leaves: Sequence[Tensor], found: Logprobs, targets: Tensor, **options: Any
) -> list[Tensor]:
    formula = functools.partial(linear_scores, targets=targets, **options)
    reference = functools.partial(formula, rounded=dropped)
    return assert_scores_as_accurate(found, formula, leaves, reference=reference, factor=TWICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_linear_operators_of_rows_match_float64(dtype: torch.dtype, softcap: float | None) -> None:
    inputs, targets, temperature = head_inputs()
    rows = slice(0, 40)
    leaves = [x.to(dtype).requires_grad_() for x in (inputs[0][rows].clone(), *inputs[1:])]
    targets, formula_options = targets[rows], {"temperature": temperature[rows], "softcap": softcap, "logit_scale": 0.8}
    options: dict[str, Any] = {"bias": leaves[2], "implementation": "rows", **formula_options}
    found = linear_logprob(*leaves[:2], targets, with_entropy=True, **options)
    formula = functools.partial(linear_scores, targets=targets, **formula_options)
    d_hidden, *_ = assert_scores_as_accurate(found, formula, leaves)
    assert not d_hidden[2].any()
    tokens, loss_fn = random_tokens(len(targets)), combine(ppo_clip(), entropy_bonus(coef=0.01))
    loss = linear_loss(*leaves[:2], targets, loss_fn, **tokens, **options).loss
    assert_loss_as_accurate(loss, loss_fn, leaves, targets, tokens, **formula_options)


# exponentials kept of all columns, of 512, of 256
@pytest.mark.parametrize(("budget", "with_bias"), [(None, True), (None, False), (165_000, False), (100_000, True)])
@pytest.mark.usefixtures("_tiles_on_cpu")
def test_linear_logprob_in_tiles_matches_float64(budget: int | None, with_bias: bool) -> None:
    inputs, targets, temperature = head_inputs()
    leaves = [x.requires_grad_() for x in (inputs if with_bias else inputs[:2])]
    options: dict[str, Any] = {"temperature": temperature, "logit_scale": 0.8}
    found = scored_in_tiles(
        *leaves[:2], targets, bias=leaves[2] if with_bias else None, memory_budget_bytes=budget, **options
    )
    assert found.logprob[2] == 0 and found.entropy[2] == 0
    for _ in range(2):  # The exponentials are used up: a second backward computes them again.
        d_hidden, *_ = assert_tiles_as_accurate(leaves, found, targets, **options)
        assert not d_hidden[2].any()


@pytest.mark.parametrize(
    ("budget", "first", "again"),
    [
        (None, [], [(0, 700)]),
        (165_000, [(512, 700)], [(0, 512), (512, 700)]),
        (100_000, [(256, 512), (512, 700)], [(0, 256), (256, 512), (512, 700)]),
    ],
)
@pytest.mark.usefixtures("_tiles_on_cpu")
def test_only_logits_whose_exponentials_were_not_kept_are_made_again(
    budget: int | None, first: list[tuple[int, int]], again: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        made.append((args[3].start, args[3].stop))
        return triton_tile_gradients.dlogits_from_product(*args, **kwargs)

    monkeypatch.setattr(linear_tiled, "dlogits_from_product", recorded)
    (hidden, weight, _), targets, _ = head_inputs()
    hidden = hidden.nan_to_num().requires_grad_()
    total = scored_in_tiles(hidden, weight, targets, memory_budget_bytes=budget).logprob.sum()
    for columns in (first, again):
        total.backward(retain_graph=True)
        assert made == columns
        made.clear()


@pytest.mark.parametrize(
    ("budget", "is_differentiated"), [(3_000, False), (100_000, True), (165_000, True)], ids=["scores", "1 tile", "2"]
)
@pytest.mark.usefixtures("_tiles_on_cpu")
def test_statistics_of_tiles_are_in_the_budget_beside_the_exponentials(
    budget: int, is_differentiated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hidden, weight, _), targets, _ = head_inputs()
    runs = []

    def recorded(masked_TH: Tensor, *args: Any, exponentials_TV: Tensor | None, **kwargs: Any) -> Any:
        num_columns = 0 if exponentials_TV is None else exponentials_TV.shape[1]
        runs.append((len(masked_TH), num_columns))
        return triton_tiles.tile_statistics(masked_TH, *args, exponentials_TV=exponentials_TV, **kwargs)

    monkeypatch.setattr(linear_tiled, "tile_statistics", recorded)
    inputs = hidden.nan_to_num(), weight.requires_grad_(is_differentiated), targets
    found = scored_in_tiles(*inputs, memory_budget_bytes=budget)
    # The interpreter's products are the host's, and some round a row by how many there are.
    exact, _ = linear_scores(*(x.double() for x in inputs[:2]), targets=targets)
    assert_as_accurate(found.logprob, scored_in_tiles(*inputs).logprob, exact)
    most, num_columns = max(runs[:-1])
    assert sum(rows for rows, _ in runs[:-1]) == T and (num_columns > 0) is is_differentiated
    assert most * 12 * 3 + T * (2 * num_columns + 4 * math.ceil(num_columns / 256)) <= budget


@pytest.mark.usefixtures("_tiles_on_cpu")
def test_tiles_with_masked_columns_and_peaks() -> None:
    (hidden, weight, bias), targets, _ = head_inputs()
    bias[256:512] = -math.inf  # a whole tile
    bias[600:] = -math.inf
    targets = targets.where(targets < 256, 5)
    hidden[2], hidden[3:] = 0.0, hidden[3:] * 8
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert_tiles_as_accurate(leaves, scored_in_tiles(*leaves[:2], targets, bias=leaves[2]), targets)


@pytest.mark.parametrize("implementation", ["tiled", "rows"])
@pytest.mark.usefixtures("_tiles_on_cpu")
def test_a_bias_that_takes_all_columns_out_gives_nan(implementation: str) -> None:
    hidden, weight = torch.randn(3, 8).requires_grad_(), torch.randn(5, 8).requires_grad_()
    options: dict[str, Any] = {"bias": torch.full((5,), -math.inf), "implementation": implementation}
    for budget in (None, 128 * 256 * 2):
        found = linear_logprob(
            hidden, weight, torch.arange(3), with_entropy=True, memory_budget_bytes=budget, **options
        )
        gradients = torch.autograd.grad(found.logprob.sum() + found.entropy.sum(), (hidden, weight))
        assert all(x.isnan().all() for x in (*found, *gradients))


@pytest.mark.parametrize("masked", [-math.inf, torch.finfo(torch.float32).min, -1e9], ids=str)
@pytest.mark.usefixtures("_tiles_on_cpu")
def test_masked_tiles_neither_outrank_low_rows_nor_overflow(masked: float) -> None:
    (hidden, weight, bias), targets, _ = head_inputs()
    hidden[2], targets = 0.0, targets % 256
    bias[:256] -= 400  # below 2^-200 of what a masked tile must not be taken for
    bias[256:] = masked  # a whole tile, and the one at the edge
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert_tiles_as_accurate(leaves, scored_in_tiles(*leaves[:2], targets, bias=leaves[2]), targets)


@sequence_level
def sequence_mean(logprob: Tensor, entropy: Tensor | None, per_token: object) -> tuple[Tensor, dict[str, Tensor]]:
    edges = per_token["cu_seqlens"]
    lengths = edges.diff()
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    mean = torch.zeros(len(lengths), dtype=logprob.dtype).index_add(0, index, logprob) / lengths
    return -mean[index].exp(), {}


@pytest.mark.parametrize("is_kept", [True, False], ids=["exponentials kept", "chunks"])
@pytest.mark.parametrize("is_sequences", [False, True], ids=["tokens", "sequences"])
@pytest.mark.usefixtures("_tiles_on_cpu")
def test_linear_loss_in_tiles_matches_float64(
    is_sequences: bool, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_tiled, "_TiledWork" if is_kept else "loss_in_two_passes", None)  # the other one
    inputs, targets, temperature = head_inputs()
    leaves, tokens = [x.requires_grad_() for x in inputs], random_tokens(T)
    tokens["token_weight"].masked_fill_(targets == -100, 0)
    loss_fn = sequence_mean if is_sequences else combine(ppo_clip(), kl(coef=0.1), entropy_bonus(coef=0.01))
    edges = torch.tensor([0, 40, 100, T]) if is_sequences else None
    found = linear_loss(
        *leaves[:2], targets, loss_fn, bias=leaves[2], temperature=temperature, cu_seqlens=edges,
        memory_budget_bytes=110_000 if is_kept else 60_000, implementation="tiled", **tokens,
    )  # fmt: skip

    def evaluated(logprob: Tensor, entropy: Tensor, per_token: Any) -> Any:
        return sequence_mean.function(logprob, entropy, {"cu_seqlens": edges})

    for _ in range(2):  # exponentials that were kept are used up by the first
        assert_loss_as_accurate(
            found.loss, evaluated if is_sequences else loss_fn, leaves, targets, tokens, rounded=dropped,
            factor=TWICE, temperature=temperature,
        )  # fmt: skip
    wide, double = doubled(*leaves), {name: x.double() for name, x in tokens["per_token"].items()}
    want = linear_loss(
        *wide[:2], targets, loss_fn, bias=wide[2], cu_seqlens=edges,
        temperature=temperature.double(), implementation="reference", per_token=double,
        token_weight=tokens["token_weight"].double(),
    )  # fmt: skip
    assert found.stats.keys() == want.stats.keys()
    for name, value in found.stats.items():
        # Means of numbers that an error of a log-probability changes by at most the ratio, or by it.
        magnitude = (1 + want.stats.get("ratio_max", torch.tensor(1.0)).double()) * 40
        assert_within_rounding(value, want.stats[name], terms=T + H + V, magnitude=magnitude, what=name)
    (d_hidden,) = torch.autograd.grad(found.loss, leaves[0])
    assert not d_hidden[2].any()


@pytest.mark.parametrize(
    ("asked", "beside"), [("hw", (4000 + 2000) * 80 * 4), ("h", 4000 * 80 * 4), ("w", 2000 * 80 * 4), ("", 0)]
)
def test_chunks_have_the_budget_and_the_room_of_the_gradients_asked_for(
    asked: str, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.empty(4000, 80, requires_grad="h" in asked)
    weight = torch.empty(2000, 80, requires_grad="w" in asked)
    problem = LinearHeadProblem(
        ScaledRows(torch.zeros(4000, dtype=torch.int64), -100, 1.0), memory_budget_bytes=600_000
    )
    monkeypatch.setattr(linear_tiled, "loss_in_chunks", lambda work, inputs, loss, rows: rows)
    rows = linear_tiled.linear_loss_tiled(hidden, weight, None, problem, NO_LOSS)
    row_bytes = 2 * 2000 + 8 * 16
    assert rows * row_bytes <= 600_000 + beside < (rows + 128) * row_bytes  # in whole tiles


@pytest.mark.parametrize(
    ("asked", "beside"), [("hw", 2000 * 80 * 4), ("h", 0), ("w", 2000 * 80 * 4), ("hwb", 2000 * 80 * 4 + 2000 * 4)]
)
def test_exponentials_are_kept_in_the_budget_and_the_accumulators_that_are_not_made(
    asked: str, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_tiled, "loss_in_chunks", lambda work, inputs, loss, rows: "chunks")
    monkeypatch.setattr(linear_tiled, "loss_in_two_passes", lambda logprob, inputs, problem, loss: "kept")
    weight, bias = torch.empty(2000, 80, requires_grad="w" in asked), torch.empty(2000, requires_grad="b" in asked)
    fitting = (600_000 + beside) // (2 * 2000 + 8 * 16)
    for num_rows, is_kept in ((fitting, beside > 0), (fitting + 1, False)):
        hidden = torch.empty(num_rows, 80, requires_grad="h" in asked)
        problem = LinearHeadProblem(
            ScaledRows(torch.zeros(num_rows, dtype=torch.int64), -100, 1.0), memory_budget_bytes=600_000
        )
        how = linear_tiled.linear_loss_tiled(hidden, weight, bias, problem, NO_LOSS)
        assert how == ("kept" if is_kept else "chunks")


def alive_after(run: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[int, Tensor]:
    """Rooms for exponentials that are alive when ``run`` has returned."""
    rooms: list[weakref.ref[Tensor]] = []

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        room = triton_tiles.pitched(*args, **kwargs)
        if room.numel():
            rooms.append(weakref.ref(room.untyped_storage()))
        return room

    monkeypatch.setattr(linear_tiled, "pitched", watched)
    value = run()
    gc.collect()
    return sum(room() is not None for room in rooms), value


@pytest.mark.parametrize("operator", ["linear_logprob", "linear_loss"])
@pytest.mark.usefixtures("_tiles_on_cpu")
def test_a_checkpoint_lets_go_of_the_exponentials_and_makes_them_again(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hidden, weight, _), targets, _ = head_inputs()
    rows = slice(3, 80)
    hidden, weight, targets = hidden[rows].clone().requires_grad_(), weight.requires_grad_(), targets[rows]
    tokens = {"per_token": {}, "token_weight": torch.ones(len(targets))}

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        if operator == "linear_logprob":
            return -scored_in_tiles(hidden, weight, targets).logprob.sum()
        return linear_loss(hidden, weight, targets, lambda x, *_: (-x, {}), implementation="tiled", **tokens).loss

    num_kept, value = alive_after(lambda: run(hidden, weight), monkeypatch)
    assert_sum_as_accurate(value, (hidden, weight), targets)
    assert num_kept == 1
    num_kept, value = alive_after(lambda: checkpoint(run, hidden, weight, use_reentrant=False), monkeypatch)
    assert num_kept == 0
    for _ in range(2):
        assert_sum_as_accurate(value, (hidden, weight), targets)
    with torch.no_grad():
        assert alive_after(lambda: run(hidden, weight), monkeypatch)[0] == 0


@pytest.mark.usefixtures("_tiles_on_cpu")
def test_a_second_backward_has_the_room_of_the_first() -> None:
    (hidden, weight, _), targets, _ = head_inputs()
    hidden, weight = hidden[3:80].clone().requires_grad_(), weight.requires_grad_()
    tokens: dict[str, Any] = {"per_token": {}, "token_weight": torch.ones(77)}
    budget = 2_000  # a row; a strip of all rows is more
    loss = linear_loss(
        hidden, weight, targets[3:80], lambda x, *_: (-x, {}), memory_budget_bytes=budget, implementation="tiled",
        **tokens,
    ).loss  # fmt: skip
    for _ in range(2):
        assert_sum_as_accurate(loss, (hidden, weight), targets[3:80])


@pytest.mark.parametrize("implementation", ["tiled", "rows"])
@pytest.mark.parametrize("budget", [None, 8_000], ids=["exponentials kept", "chunks"])
@pytest.mark.usefixtures("_tiles_on_cpu")
def test_an_infinite_slope_at_masked_tokens_reaches_nothing(implementation: str, budget: int | None) -> None:
    def loss_fn(logprob: Tensor, entropy: Tensor, per_token: object) -> tuple[Tensor, dict[str, Tensor]]:
        return (-logprob).sqrt() + entropy.sqrt(), {}  # of a masked token the slope of 0 ** 0.5, times 0

    hidden, weight = torch.randn(9, 8).requires_grad_(), torch.randn(260, 8).requires_grad_()
    targets, tokens = torch.arange(9), {"per_token": {}, "token_weight": torch.ones(9)}
    targets[::4] = -100
    is_kept = targets != -100
    found = linear_loss(
        hidden, weight, targets, loss_fn, memory_budget_bytes=budget, implementation=implementation, **tokens
    )
    d_hidden, d_weight = torch.autograd.grad(found.loss, (hidden, weight))
    kept = [hidden.detach()[is_kept].requires_grad_(), weight]
    sides = [[d_hidden[is_kept], d_weight]]
    for leaves, rounded in ((kept, dropped if implementation == "tiled" else None), (doubled(*kept), None)):
        values, _ = loss_fn(*linear_scores(*leaves, targets=targets[is_kept], rounded=rounded), {})
        sides.append(list(torch.autograd.grad(values.sum(), leaves)))
    assert_as_accurate(*sides)
    assert not d_hidden[::4].any()


@pytest.mark.parametrize(
    ("num_columns", "rows"), [(4096, 1024), (2048, 2048), (896, 4224), (5120, None), (64, 132 * 128), (2**16, None)]
)
def test_a_wave_has_a_tile_for_almost_every_core(
    num_columns: int, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_tiles, "num_cores", lambda device: 132)
    assert triton_tiles.rows_of_a_wave(num_columns, torch.device("cpu")) == rows


@pytest.mark.usefixtures("_tiles_on_cpu")
def test_any_number_of_rows_runs_what_was_compiled_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: set[tuple[str, int, int]] = set()

    class Recorded:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
            def run(*args: Any, **constants: Any) -> Any:
                launches.add((self.name, grid[0], constants["NUM_PROGRAMS"]))
                return self.kernel[grid](*args, **constants)

            return run

    kernels = {"_statistics_kernel": triton_tiles, "_dlogits_kernel": triton_tile_gradients}
    for name, module in kernels.items():
        monkeypatch.setattr(module, name, Recorded(name, getattr(module, name)))
    (hidden, weight, _), targets, _ = head_inputs()
    for rows in (slice(3, 4), slice(3, T)):
        found = scored_in_tiles(
            hidden[rows].requires_grad_(), weight[:300], targets[rows] % 300, memory_budget_bytes=80_000
        )
        found.logprob.sum().backward(retain_graph=True)
        found.logprob.sum().backward()
    assert {grid for _, grid, _ in launches} == {1, 2}
    assert {(name, step) for name, _, step in launches} == {(name, 2) for name in kernels}


@pytest.mark.usefixtures("_tiles_on_cpu")
def test_tiles_without_rows_give_zeros() -> None:
    (_, weight, _), _, _ = head_inputs()
    hidden, weight = torch.zeros(0, H, requires_grad=True), weight.requires_grad_()
    nothing = torch.zeros(0, dtype=torch.long)
    found = scored_in_tiles(hidden, weight, nothing)
    (gradient,) = torch.autograd.grad(found.logprob.sum() + found.entropy.sum(), weight)
    assert found.logprob.shape == (0,) and not gradient.any()


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (Query("cpu", torch.float32, 8, 10), "it multiplies bfloat16 alone, and the inputs are float32"),
        (Query("cpu", torch.bfloat16, 12, 10), "H = 12 is no multiple of 8"),
        (Query("cpu", torch.bfloat16, 8, 10, frozenset({"softcap"})), "it has no softcap"),
        (Query("cpu", torch.bfloat16, 8, 10, frozenset({"group"})), "leave out group="),
    ],
    ids=["float32", "H", "softcap", "group"],
)
def test_what_tiles_cannot_do_is_refused_with_the_reason(query: Query, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=r"tiled: .*" + reason):
        choose("linear_loss", query, "tiled")


@pytest.mark.usefixtures("_tiles_on_cpu")
def test_a_budget_below_one_strip_is_an_error_that_says_the_least() -> None:
    (hidden, weight, _), targets, _ = head_inputs()
    hidden = hidden.nan_to_num().requires_grad_()
    with pytest.raises(InvalidInputError, match=r"does not hold a strip of 256 logits of each of 150 rows; .* 82008"):
        scored_in_tiles(hidden, weight, targets, memory_budget_bytes=5_000)
