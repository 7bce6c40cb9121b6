from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.errors import InvalidInputError
from rlcore.ops import combine, entropy_bonus, kl, linear_logprob, linear_loss, ppo_clip, sequence_level
from tests.accuracy import assert_same_bits, assert_within_rounding
from tests.kernels.plain import assert_equal_in_float64, assert_loss_as_accurate, doubled

IMPLEMENTATIONS = ["reference", "chunked"]
T, H, V = 61, 13, 257  # odd, not a multiple of 8, one past a block
CU_SEQLENS = torch.tensor([0, 5, 5, 40, 52, 61])  # one empty, one longer than a chunk


def random_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=generator) * 0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


def random_tokens(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(8)
    old = -6 + torch.randn(T, generator=generator)
    per_token = {
        "old_logprobs": old,
        "ref_logprobs": old + torch.randn(T, generator=generator) * 0.3,
        "advantages": torch.randn(T, generator=generator),
    }
    weight = torch.rand(T, generator=generator) / T
    return {"per_token": {name: x.to(dtype) for name, x in per_token.items()}, "token_weight": weight.to(dtype)}


def policy_loss() -> Any:
    return combine(ppo_clip(dual_clip=3.0), kl(coef=0.1), entropy_bonus(coef=0.01))


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("is_sequence_level", [False, True])
def test_rows_may_have_several_dimensions(is_sequence_level: bool) -> None:
    hidden, weight, targets = random_inputs()
    tokens, rows = random_tokens(), slice(60)
    tokens["per_token"]["vectors"] = torch.randn(T, 3)
    loss_fn = sequence_level(policy_loss()) if is_sequence_level else policy_loss()
    edges = torch.tensor([0, 20, 40, 60])

    def loss(shape: tuple[int, ...]) -> Any:
        def shaped(x: Tensor) -> Tensor:
            return x[rows].reshape(*shape, *x.shape[1:])

        return linear_loss(
            shaped(hidden),
            weight,
            shaped(targets),
            loss_fn,
            per_token={name: shaped(x) for name, x in tokens["per_token"].items()},
            token_weight=shaped(tokens["token_weight"]),
            temperature=shaped(torch.linspace(0.6, 1.4, T)),
            cu_seqlens=edges,
        )

    found, want = loss((3, 20)), loss((60,))
    assert torch.equal(found.loss, want.loss) and found.stats == want.stats
    for one, other in zip(gradients(found.loss, hidden, weight), gradients(want.loss, hidden, weight), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_operands_of_two_dtypes_are_used_in_the_wider(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    hidden, weight, targets = random_inputs()
    leaves = [x.detach().to(dtype).requires_grad_() for x, dtype in zip((hidden, weight), dtypes, strict=True)]
    same = [x.detach().float().requires_grad_() for x in leaves]
    found, want = (linear_loss(*x, targets, policy_loss(), **random_tokens()).loss for x in (leaves, same))
    assert torch.equal(found, want)
    for leaf, one, other in zip(leaves, gradients(found, *leaves), gradients(want, *same), strict=True):
        assert torch.equal(one, other.to(leaf.dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_statistics_are_means_by_weights_of_their_own(implementation: str) -> None:
    hidden, weight, targets = random_inputs(torch.float64)
    tokens = random_tokens(torch.float64)
    tokens["token_weight"][:9] = 0.0
    targets[9] = -100
    is_counted = torch.arange(T) > 9
    options = {"implementation": implementation, "memory_budget_bytes": None}
    plain = linear_loss(hidden, weight, targets, ppo_clip(), **tokens, **options)
    mask = is_counted.clone()
    mask[:5] = True  # what does not count for the loss does not count here either
    found = linear_loss(hidden, weight, targets, ppo_clip(), stats_weight=mask, **tokens, **options)
    assert torch.equal(found.loss, plain.loss)
    assert all(map(torch.equal, gradients(found.loss, hidden, weight), gradients(plain.loss, hidden, weight)))
    scores = linear_logprob(hidden, weight, targets, with_entropy=True)
    log_ratio = (scores.logprob - tokens["per_token"]["old_logprobs"]).detach()
    want = {"entropy_mean": scores.entropy.detach(), "ratio_mean": log_ratio.exp()}
    for name, values in want.items():
        assert_equal_in_float64(found.stats[name], values[is_counted].mean(), terms=T + V)
        by_weight = (values * tokens["token_weight"])[is_counted].sum() / tokens["token_weight"][is_counted].sum()
        assert_equal_in_float64(plain.stats[name], by_weight, terms=T + V)
    assert found.stats["ratio_max"] == plain.stats["ratio_max"]
    with pytest.raises(InvalidInputError, match=rf"^stats_weight must be one number for each row of targets = \[{T}\]"):
        linear_loss(hidden, weight, targets, ppo_clip(), stats_weight=mask[1:], **tokens)


def test_entries_of_another_shape_than_the_targets_are_refused() -> None:
    hidden, weight, targets = random_inputs()
    tokens = random_tokens()
    per_token = {name: x[:60].view(3, 20) for name, x in tokens["per_token"].items()}
    weights = tokens["token_weight"][:60]
    hidden, targets = hidden[:60].view(3, 20, H), targets[:60].view(3, 20)
    with pytest.raises(InvalidInputError, match=r"^token_weight must begin with the dimensions of targets, \[3, 20\]"):
        linear_loss(hidden, weight, targets, ppo_clip(), per_token=per_token, token_weight=weights)
    per_token["advantages"] = per_token["advantages"].flatten()
    message = r"^per_token\['advantages'\] must begin with the dimensions of targets, \[3, 20\]; got \[60\]"
    with pytest.raises(InvalidInputError, match=message):
        linear_loss(hidden, weight, targets, ppo_clip(), per_token=per_token, token_weight=weights.view(3, 20))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_loss_matches_float64_autograd(dtype: torch.dtype, implementation: str) -> None:
    hidden, weight, targets = random_inputs(dtype)
    bias = torch.linspace(-1, 1, V).requires_grad_()
    options = {"temperature": torch.linspace(0.6, 1.4, T), "softcap": 6.0, "logit_scale": 0.9}
    tokens = random_tokens()
    found = linear_loss(
        hidden, weight, targets, policy_loss(), bias=bias, implementation=implementation, **options, **tokens
    )
    assert found.loss.dtype == torch.float32 and found.loss.shape == ()
    assert_loss_as_accurate(found.loss, policy_loss(), (hidden, weight, bias), targets, tokens, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_linear_loss_passes_gradcheck(implementation: str) -> None:
    hidden = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, -100, 2, 2, 1])

    def loss_fn(logprob: Tensor, entropy: Tensor, per_token: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return per_token["a"] * logprob.exp() + entropy * logprob, {}

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        per_token = {"a": torch.arange(6.0, dtype=torch.float64)}
        weights = torch.arange(1.0, 7.0, dtype=torch.float64)
        return linear_loss(
            hidden,
            weight,
            targets,
            loss_fn,
            per_token=per_token,
            token_weight=weights,
            softcap=3.0,
            implementation=implementation,
        ).loss

    assert torch.autograd.gradcheck(run, (hidden, weight))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size, offset", [(80.0, 0.0), (1.0, 1e4), (0.0, 0.0), (1.0, -1e4)])
def test_extreme_logits(size: float, offset: float, implementation: str) -> None:
    hidden = torch.nn.functional.one_hot(torch.arange(T) % H, H).float().requires_grad_()
    weight = ((torch.rand(V, H, generator=torch.Generator().manual_seed(0)) * 2 - 1) * size + offset).requires_grad_()
    targets, tokens = torch.arange(T) % V, random_tokens()
    tokens["per_token"]["old_logprobs"] = tokens["per_token"]["ref_logprobs"] = torch.full((T,), -3.0 - size)
    found = linear_loss(hidden, weight, targets, policy_loss(), implementation=implementation, **tokens)
    reach = 2 * size + 1  # the products are of ones and zeros, and a common offset is taken off
    assert_loss_as_accurate(found.loss, policy_loss(), (hidden, weight), targets, tokens, reach=reach)


@pytest.mark.parametrize("size", [1, 7, pytest.param(151936, marks=pytest.mark.slow), 262144])
def test_real_vocabularies_with_columns_of_minus_infinity_match_float64(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    hidden = torch.randn(5, 3, generator=generator).requires_grad_()
    weight = torch.randn(size, 3, generator=generator).requires_grad_()
    bias, targets = torch.zeros(size), torch.tensor([0, size - 1, size // 2, -100, 0])
    bias[1 : size // 2 : 3] = -math.inf
    old = torch.full((5,), -math.log(size))
    tokens = {"per_token": {"old_logprobs": old, "ref_logprobs": old, "advantages": torch.linspace(-1, 1, 5)}}
    tokens |= {"token_weight": torch.linspace(0.1, 0.3, 5)}
    found = linear_loss(hidden, weight, targets, policy_loss(), bias=bias, implementation="chunked", **tokens)
    assert_loss_as_accurate(found.loss, policy_loss(), (hidden, weight), targets, tokens, bias=bias)


def test_chunked_statistics_match_the_reference() -> None:
    hidden, weight, targets = random_inputs(torch.float64)
    tokens = random_tokens(torch.float64)
    targets[10:20] = -100
    tokens["token_weight"][30:35] = 0
    found, want = (
        linear_loss(hidden, weight, targets, policy_loss(), implementation=name, **tokens).stats
        for name in ("chunked", "reference")
    )
    assert found.keys() == want.keys() >= {"entropy_mean", "ratio_max", "clip_low_mean", "kl_mean"}
    assert_equal_in_float64(found, want, terms=T + V)
    assert not any(values.requires_grad for values in found.values())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_statistics_are_reduced_by_the_ending_of_their_names(implementation: str) -> None:
    hidden, weight, targets = random_inputs()
    x = torch.arange(float(T))
    x[3], targets[3] = math.nan, -100
    w = torch.rand(T)
    w[:2] = 0

    def loss_fn(logprob: Tensor, entropy: None, per_token: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        assert entropy is None
        return logprob, {f"x_{ending}": per_token["x"] for ending in ("mean", "sum", "min", "max")}

    _, stats = linear_loss(
        hidden,
        weight,
        targets,
        loss_fn,
        per_token={"x": x},
        token_weight=w,
        with_entropy=False,
        implementation=implementation,
    )
    counted = torch.tensor([t for t in range(2, T) if t != 3])
    exact = (x[counted].double() * w[counted]).sum() / w[counted].double().sum()
    assert_within_rounding(stats["x_mean"], exact, terms=2 * T + 2)  # two sums, products and a division
    assert (stats["x_sum"], stats["x_min"], stats["x_max"]) == (x[counted].sum(), 2, T - 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("masked_by", ["target", "weight"])
def test_masked_tokens_contribute_nothing_whatever_they_hold(masked_by: str, implementation: str) -> None:
    hidden, weight, targets = random_inputs(torch.float64)
    tokens = random_tokens(torch.float64)
    is_masked = torch.arange(T) % 4 == 1
    clean = hidden.detach()[~is_masked].requires_grad_()
    clean_tokens = {
        "per_token": {name: values[~is_masked] for name, values in tokens["per_token"].items()},
        "token_weight": tokens["token_weight"][~is_masked],
    }
    want = linear_loss(clean, weight, targets[~is_masked], policy_loss(), implementation=implementation, **clean_tokens)
    want_gradients = gradients(want.loss, clean, weight)

    with torch.no_grad():
        hidden[is_masked] = math.nan
    for values in tokens["per_token"].values():
        values[is_masked] = math.nan
    if masked_by == "target":
        targets[is_masked] = -100
        tokens["token_weight"][is_masked] = math.nan
    else:
        targets[is_masked] = 10**6  # no token id; nobody looks
        tokens["token_weight"][is_masked] = 0
    temperature = torch.ones(T, dtype=torch.float64).masked_fill(is_masked, math.nan)
    found = linear_loss(
        hidden, weight, targets, policy_loss(), temperature=temperature, implementation=implementation, **tokens
    )
    d_hidden, d_weight = gradients(found.loss, hidden, weight)
    assert_equal_in_float64(found, want, terms=T + V)
    assert d_hidden[is_masked].count_nonzero() == 0
    assert_equal_in_float64((d_hidden[~is_masked], d_weight), want_gradients, terms=T + V)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_infinite_slope_at_masked_tokens_reaches_nothing(implementation: str) -> None:
    hidden, weight, targets = random_inputs(torch.float64)
    targets[::3] = -100

    def loss_fn(logprob: Tensor, entropy: Tensor, per_token: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return (-logprob).sqrt() + entropy.sqrt(), {}  # of a masked token the slope of 0 ** 0.5, times 0

    options = {"per_token": {}, "token_weight": torch.ones(T), "implementation": implementation}
    found = gradients(linear_loss(hidden, weight, targets, loss_fn, **options).loss, hidden, weight)
    is_kept = targets != -100
    kept = hidden.detach()[is_kept].requires_grad_()
    options["token_weight"] = torch.ones(int(is_kept.sum()))
    want = gradients(linear_loss(kept, weight, targets[is_kept], loss_fn, **options).loss, kept, weight)
    assert not found[0][~is_kept].any()
    assert_equal_in_float64((found[0][is_kept], found[1]), want, terms=T + V)


@pytest.mark.parametrize("rows", [1, 127, 65537])
def test_any_number_of_rows_matches_float64(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((rows, 3), (7, 3)))
    targets = torch.randint(0, 7, (rows,), generator=generator)
    targets[1::5] = -100
    old = torch.randn(rows, generator=generator) * 0.1 - 2
    tokens = {"per_token": {"old_logprobs": old, "ref_logprobs": old, "advantages": old + 2}}
    tokens |= {"token_weight": torch.rand(rows, generator=generator) / rows}
    found = linear_loss(hidden, weight, targets, policy_loss(), implementation="chunked", **tokens)
    assert_loss_as_accurate(found.loss, policy_loss(), (hidden, weight), targets, tokens)
    double = {"per_token": {name: x.double() for name, x in tokens["per_token"].items()}}
    double["token_weight"] = tokens["token_weight"].double()
    wide = doubled(hidden, weight)
    outputs = [
        linear_loss(*wide, targets, policy_loss(), implementation=name, **double) for name in ("chunked", "reference")
    ]
    assert_equal_in_float64(*outputs, terms=rows)


class CountingOperations(TorchDispatchMode):
    """Counts those that make something: views and uninitialised memory are free on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_made = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_free = call.is_view or "empty" in call.name() or call.name().startswith("aten::detach")
        self.num_made += not is_free
        return call(*args, **(kwargs or {}))


def test_a_chunk_costs_few_operations_besides_the_loss_function() -> None:
    """Each is a kernel on a GPU, of microseconds in which its products wait: a chunk of 3072 x 896 takes 4.6 ms."""

    def operations(rows: int) -> int:
        hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
        old = torch.full((rows,), -2.0)
        tokens = {"per_token": {"old_logprobs": old, "advantages": old}, "token_weight": torch.ones(rows)}
        with CountingOperations() as counted:
            linear_loss(hidden, weight, torch.zeros(rows).long(), ppo_clip(), memory_budget_bytes=16 * 9 * 12, **tokens)
        return counted.num_made

    logprob = torch.zeros(16, requires_grad=True)
    with CountingOperations() as of_loss:
        value, _ = ppo_clip()(logprob, None, {"old_logprobs": torch.zeros(16), "advantages": torch.ones(16)})
        torch.autograd.grad(value, logprob, torch.ones(16))
    per_chunk = (operations(16 * 8) - operations(16 * 4)) / 4
    # 23: three products, statistics and gradient of the logits, and what is masked. A sum in each chunk made it 36.
    assert per_chunk - of_loss.num_made <= 28


def test_results_do_not_depend_on_the_chunk_size_and_reruns_are_bit_identical() -> None:
    hidden, weight, targets = random_inputs(torch.float64)
    tokens, runs = random_tokens(torch.float64), []
    for budget in (None, None, 3 * V * 8, 20 * V * 8):
        found = linear_loss(hidden, weight, targets, policy_loss(), memory_budget_bytes=budget, **tokens)
        runs.append([found.loss, *gradients(found.loss, hidden, weight), *found.stats.values()])
    assert all(torch.equal(one, other) for one, other in zip(runs[0], runs[1], strict=True))
    for run in runs[2:]:
        assert_equal_in_float64(run, runs[0], terms=T + V)


def test_permuting_tokens_permutes_the_hidden_gradient_and_leaves_the_rest() -> None:
    hidden, weight, targets = random_inputs(torch.float64)
    tokens = random_tokens(torch.float64)
    order = torch.randperm(T)
    moved = hidden.detach()[order].requires_grad_()
    moved_tokens = {
        "per_token": {name: values[order] for name, values in tokens["per_token"].items()},
        "token_weight": tokens["token_weight"][order],
    }
    first = linear_loss(hidden, weight, targets, policy_loss(), **tokens).loss
    second = linear_loss(moved, weight, targets[order], policy_loss(), **moved_tokens).loss
    d_hidden, d_weight = gradients(first, hidden, weight)
    expected = [first, d_hidden[order], d_weight]
    assert_equal_in_float64([second, *gradients(second, moved, weight)], expected, terms=T + V)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_upstream_gradient_is_honoured_and_backward_can_run_twice(implementation: str) -> None:
    hidden, weight, targets = random_inputs(torch.float64)
    tokens = random_tokens(torch.float64)
    loss = linear_loss(hidden, weight, targets, policy_loss(), implementation=implementation, **tokens).loss
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    thrice = torch.autograd.grad(-3 * loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    for one, three, same in zip(once, thrice, again, strict=True):
        assert_equal_in_float64(three, -3 * one, terms=T + V)
        assert_same_bits(one, same)
        assert one.abs().max() > 0


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_the_gradients_asked_for_are_computed(needs: tuple[bool, bool]) -> None:
    *inputs, targets = random_inputs()
    want = gradients(linear_loss(*inputs, targets, policy_loss(), **random_tokens()).loss, *inputs)
    some = [x.detach().requires_grad_(needed) for x, needed in zip(inputs, needs, strict=True)]
    linear_loss(*some, targets, policy_loss(), **random_tokens()).loss.backward()
    for x, needed, expected in zip(some, needs, want, strict=True):
        assert torch.equal(x.grad, expected) if needed else x.grad is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_gradients_only_the_loss_is_computed(implementation: str) -> None:
    hidden, weight, targets = random_inputs(torch.float64)
    tokens = random_tokens(torch.float64)
    want = linear_loss(hidden, weight, targets, policy_loss(), **tokens).loss
    with torch.no_grad():
        loss = linear_loss(hidden, weight, targets, policy_loss(), implementation=implementation, **tokens).loss
    assert not loss.requires_grad
    assert_equal_in_float64(loss, want, terms=T + V)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [0, 4])
def test_no_tokens_or_only_ignored_ones_give_a_differentiable_zero(count: int, implementation: str) -> None:
    hidden, weight = torch.randn(count, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    nothing = torch.full((count,), math.nan)
    loss, stats = linear_loss(
        hidden,
        weight,
        torch.full((count,), -100),
        policy_loss(),
        per_token={"old_logprobs": nothing, "ref_logprobs": nothing, "advantages": nothing},
        token_weight=torch.ones(count),
        implementation=implementation,
    )
    loss.backward()
    assert loss == 0 and hidden.grad.count_nonzero() == 0 and weight.grad.count_nonzero() == 0
    assert stats["ratio_mean"].isnan() and stats["ratio_max"] == -math.inf


@sequence_level
def gspo(logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sequence ratios as in arXiv 2507.18071, the value of a sequence on each of its tokens."""
    edges, mask = per_token["cu_seqlens"], per_token["token_mask"]
    sequence = torch.repeat_interleave(torch.arange(len(edges) - 1), edges.diff(), output_size=len(logprob))
    difference = torch.where(mask, logprob - per_token["old_logprobs"], 0.0)
    sums = difference.new_zeros(len(edges) - 1).index_add(0, sequence, difference)
    counts = difference.new_zeros(len(edges) - 1).index_add(0, sequence, mask.to(difference.dtype))
    ratio = (sums / counts.clamp(min=1)).exp()[sequence]
    advantage = per_token["advantages"]
    return torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage), {"ratio_mean": ratio}


def test_a_sequence_level_loss_sees_whole_sequences() -> None:
    hidden, weight, targets = random_inputs(torch.float64)
    targets[[2, 41, 42]] = -100
    runs = []
    # The least budgets hold no sequence: then all log-probabilities come first.
    budgets = [("reference", None), ("chunked", None), ("chunked", 3 * V * 8), ("chunked", 30 * V * 8)]
    for name, budget in budgets:
        found = linear_loss(
            hidden,
            weight,
            targets,
            gspo,
            cu_seqlens=CU_SEQLENS,
            memory_budget_bytes=budget,
            implementation=name,
            **random_tokens(torch.float64),
        )
        runs.append([found.loss, *gradients(found.loss, hidden, weight), found.stats["ratio_mean"]])
    for run in runs[1:]:
        assert_equal_in_float64(run, runs[0], terms=T + V)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_masked_token_reaches_the_loss_as_zeros(implementation: str) -> None:
    hidden, weight, targets = random_inputs()
    targets[[2, 41, 42]] = -100
    seen: list[Tensor] = []

    @sequence_level
    def looking(
        logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        columns = (logprob, entropy, per_token["x"], per_token["x3"].sum(1), per_token["token_mask"])
        seen.append(torch.stack([column.detach().float() for column in columns], 1))
        return logprob, {}

    x = torch.full((T,), 5.0)
    x[[2, 41, 42]] = math.nan
    linear_loss(
        hidden,
        weight,
        targets,
        looking,
        per_token={"x": x, "x3": x[:, None].expand(T, 3)},
        token_weight=torch.ones(T),
        cu_seqlens=CU_SEQLENS,
        implementation=implementation,
    )
    rows = torch.cat(seen)
    assert rows[[2, 41, 42]].count_nonzero() == 0
    assert (rows[0, 2:] == torch.tensor([5.0, 15.0, 1.0])).all() and rows.isfinite().all()


def test_combining_with_a_sequence_level_term_makes_a_sequence_level_loss() -> None:
    assert isinstance(combine(kl(coef=0.1), gspo), sequence_level)
    assert not isinstance(policy_loss(), sequence_level)


def test_a_new_loss_is_a_few_lines_of_plain_torch() -> None:
    def cispo(
        logprob: Tensor, entropy: Tensor | None, per_token: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (logprob - per_token["old_logprobs"]).exp()
        weight = ratio.clamp(max=1.28).detach()
        return -weight * per_token["advantages"] * logprob, {"ratio_mean": ratio}

    hidden, weight, targets = random_inputs(torch.float64)
    found, want = (
        linear_loss(hidden, weight, targets, cispo, implementation=name, **random_tokens(torch.float64)).loss
        for name in ("chunked", "reference")
    )
    assert_equal_in_float64(gradients(found, hidden, weight), gradients(want, hidden, weight), terms=T + V)


def loss_returning(value: Any, stats: dict[str, Any] | None = None) -> Any:
    def custom_loss(logprob: Tensor, entropy: Any, per_token: Any) -> Any:
        return (value(logprob) if callable(value) else value), stats or {}

    return custom_loss


@pytest.mark.parametrize(
    "loss_fn, message",
    [
        (loss_returning(lambda x: x.sum()), r"custom_loss: its value must be a vector like logprob, \[.*\]; got \[\]"),
        (loss_returning(lambda x: x[:-1]), r"its value must be a vector like logprob, \[16\]; got \[15\]"),
        (
            loss_returning(lambda x: x + 1j),
            r"its value must be a vector like logprob, \[16\]; got \[16\] of torch.complex",
        ),
        (loss_returning(1.0), "its value must be a vector like logprob, .*; got float"),
        (loss_returning(lambda x: x.detach()), "depends on neither logprob nor entropy.*was one of them detached"),
        (loss_returning(lambda x: x, {"x_mean": torch.zeros(2)}), r"statistic 'x_mean' must be .*; got \[2\]"),
        (loss_returning(lambda x: x, {"ratio": torch.zeros(16)}), "'ratio' must end in one of _mean, _sum, _min, _max"),
    ],
)
def test_a_loss_function_that_returns_the_wrong_thing_is_named(loss_fn: Any, message: str) -> None:
    hidden, weight, targets = random_inputs()
    with pytest.raises(InvalidInputError, match=message):
        linear_loss(hidden, weight, targets, loss_fn, **random_tokens())


def test_a_token_weight_that_is_no_number_is_refused_where_the_token_counts() -> None:
    hidden, weight, targets = random_inputs()
    tokens = random_tokens()
    tokens["token_weight"] = tokens["token_weight"].clone()
    tokens["token_weight"][3] = torch.nan
    targets[3] = -100
    assert linear_loss(hidden, weight, targets, ppo_clip(), **tokens).loss.isfinite()
    targets[3] = 1
    with pytest.raises(InvalidInputError, match=r"^token_weight must be numbers; got nan at \[3\]$"):
        linear_loss(hidden, weight, targets, ppo_clip(), **tokens)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, a: x - x.mean(),
        lambda x, a: x.cumsum(0),  # the first half does not change
        lambda x, a: x * (a - a.mean()) / a.std(),
        lambda x, a: x.flip(0),
    ],
    ids=["mean", "sum of what came before", "normalised advantage", "order"],
)
def test_under_debug_a_loss_that_mixes_tokens_is_refused(mix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = random_inputs()

    def mixing(logprob: Tensor, entropy: Any, per_token: Any) -> Any:
        return mix(logprob, per_token["advantages"]), {}

    linear_loss(hidden, weight, targets, mixing, **random_tokens())
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    with pytest.raises(InvalidInputError, match=r"mixing: a token's value depends on other tokens.*@sequence_level"):
        linear_loss(hidden, weight, targets, mixing, **random_tokens())


def test_under_debug_a_statistic_that_mixes_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = random_inputs()

    def mixing(logprob: Tensor, entropy: Any, per_token: Any) -> Any:
        return logprob, {"share_mean": logprob.detach() / logprob.detach().sum()}

    monkeypatch.setenv("RLCORE_DEBUG", "1")
    with pytest.raises(InvalidInputError, match=r"mixing: a token's statistic 'share_mean' depends on other tokens"):
        linear_loss(hidden, weight, targets, mixing, **random_tokens())


def test_under_debug_a_loss_that_mixes_sequences_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = random_inputs()

    @sequence_level
    def mixing(logprob: Tensor, entropy: Any, per_token: Any) -> Any:
        return logprob * len(per_token["cu_seqlens"]), {}

    pairs = torch.tensor([*range(0, T, 2), T])
    linear_loss(hidden, weight, targets, mixing, cu_seqlens=pairs, **random_tokens())
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    with pytest.raises(InvalidInputError, match=r"mixing: a sequence's values depend on other sequences, .* in per_"):
        linear_loss(hidden, weight, targets, mixing, cu_seqlens=pairs, **random_tokens())


def test_under_debug_losses_that_mix_nothing_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = random_inputs()
    few = torch.tensor([0, 3, 3, 7, 20, 29, T])
    for loss_fn in (policy_loss(), gspo):
        plain = linear_loss(hidden, weight, targets, loss_fn, cu_seqlens=few, **random_tokens())
        with monkeypatch.context() as debugging:
            debugging.setenv("RLCORE_DEBUG", "1")
            found = linear_loss(hidden, weight, targets, loss_fn, cu_seqlens=few, **random_tokens())
        assert torch.equal(found.loss, plain.loss)
        pairs = zip(gradients(found.loss, hidden, weight), gradients(plain.loss, hidden, weight), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("coefficient", ["leaf", "computed"])
def test_under_debug_a_loss_that_reads_what_gets_no_gradient_is_refused(
    coefficient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = torch.ones(3, requires_grad=True)
    factor = leaf if coefficient == "leaf" else leaf.exp().square()

    def learnable(logprob: Tensor, entropy: Any, per_token: Any) -> Any:
        return (logprob + entropy) * factor.sum(), {}

    linear_loss(*random_inputs(), learnable, **random_tokens()).loss.backward()
    assert leaf.grad is None
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    with pytest.raises(
        InvalidInputError,
        match=r"learnable: its value depends on a tensor \[3\] torch.float32 that requires grad, .* alone; detach it, "
        "or pass the log-probabilities of linear_logprob to token_loss, which gives it one",
    ):
        linear_loss(*random_inputs(), learnable, **random_tokens())
    factor = leaf.detach()
    linear_loss(*random_inputs(), learnable, **random_tokens()).loss.backward()


def test_under_debug_a_value_of_the_wrong_shape_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    with pytest.raises(InvalidInputError, match=r"custom_loss: its value must be a vector like logprob, .*; got \[\]"):
        linear_loss(*random_inputs(), loss_returning(lambda x: x.sum()), **random_tokens())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"token_weight": torch.ones(3)}, r"token_weight must be \[T\] = \[61\]; got \[3\]. See rlcore.ops.token_w"),
        ({"token_weight": torch.ones(T, dtype=torch.int64)}, "token_weight must be float32, .*; got torch.int64"),
        ({"per_token": {"x": torch.ones(5)}}, r"per_token\['x'\] must have one entry for each of the 61 rows .* \[5\]"),
        ({"per_token": {"x": torch.ones(T, requires_grad=True)}}, r"per_token\['x'\] requires grad, .*\.detach\(\)"),
        ({"token_weight": torch.ones(T, requires_grad=True)}, "token_weight requires grad"),
        ({"token_weight": torch.ones(T, device="meta")}, "token_weight is on meta but targets is on cpu"),
        ({"loss_fn": gspo}, "a sequence-level loss needs cu_seqlens"),
        ({"loss_fn": gspo, "cu_seqlens": torch.tensor([0, 60])}, r"must rise from 0 to the 61 rows .* got \[0, 60\]"),
        ({"loss_fn": gspo, "cu_seqlens": torch.tensor([0, 9, 8, T])}, "cu_seqlens must rise from 0"),
        (
            {"loss_fn": gspo, "cu_seqlens": CU_SEQLENS, "per_token": {"token_mask": torch.ones(T)}},
            "per_token must not hold token_mask: linear_loss sets them",
        ),
        ({"per_token": {}}, r"ppo_clip needs per_token\['advantages'\]; got nothing"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, targets = random_inputs()
    arguments = {"loss_fn": ppo_clip(), **random_tokens()} | change
    with pytest.raises(InvalidInputError, match=message):
        linear_loss(hidden, weight, targets, **arguments)


def test_a_head_that_does_not_fit_and_bad_values_are_refused() -> None:
    hidden, weight, targets = random_inputs()
    beyond = targets.clone()
    beyond[4] = V
    for inputs, options, message in (
        ((hidden, weight.long(), targets), {}, "weight must be float32, bfloat16, float16, float64; got torch.int64"),
        ((hidden, weight[:, 1:], targets), {}, rf"weight must be \[V, H\] with H = {H}; got \[{V}, {H - 1}\]"),
        ((hidden, weight, targets[1:]), {}, r"targets must be one token for each row of hidden = \[61\]; got \[60\]"),
        ((hidden, weight, beyond), {}, rf"targets must be token ids in \[0, {V}\) .* got {V} at \[4\]"),
        ((hidden, weight, targets), {"temperature": 0.0}, "temperature must be a finite number > 0; got 0.0"),
        ((hidden, weight, targets), {"temperature": torch.full((T,), math.nan)}, r"finite and > 0; got nan at \[0\]"),
        ((hidden, weight, targets), {"softcap": -1.0}, "softcap must be a finite number > 0; got -1.0"),
        (
            (hidden, weight, targets),
            {"memory_budget_bytes": 1},
            f"one row of {V} logits; the least is {V * 12}",
        ),
    ):
        with pytest.raises(InvalidInputError, match=message):
            linear_loss(*inputs, ppo_clip(), **random_tokens(), **options)


def test_under_autocast_the_operands_are_lowered_as_in_linear_and_the_logits_are_not() -> None:
    hidden, weight, targets = random_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_loss(hidden, weight, targets, policy_loss(), **random_tokens())
        got = gradients(found.loss, hidden, weight)
    rounded = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    want = linear_loss(*rounded, targets, policy_loss(), **random_tokens())
    assert torch.equal(found.loss, want.loss) and found.loss.dtype == torch.float32
    for one, other in zip(got, gradients(want.loss, *rounded), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other.float())


def test_what_is_no_process_group_is_refused() -> None:
    hidden, weight, targets = random_inputs()
    with pytest.raises(InvalidInputError, match=r"group must be a torch.distributed.ProcessGroup .* in; got object"):
        linear_loss(hidden, weight, targets, ppo_clip(), group=object(), **random_tokens())  # type: ignore[arg-type]
