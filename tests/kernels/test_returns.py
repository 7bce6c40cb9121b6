from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.ops import discounted_return, gae, masked_whiten, value_loss
from tests.accuracy import assert_as_accurate, assert_within_rounding
from tests.kernels.plain import assert_equal_in_float64

IMPLEMENTATIONS = ["reference", "scan"]
GAMMA, LAM = 0.97, 0.9
LENGTHS = [0, 1, 1, 0, 2, 3, 64, 129, 0, 257, 1]  # empty ones, also first; powers of two; one past a power
SHAPE = {"cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0)}
T = sum(LENGTHS)


def random_tokens(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    values, rewards = torch.randn(2, T, generator=generator, dtype=dtype)
    mask = torch.rand(T, generator=generator) < 0.7
    mask[4 : 4 + 3] = False  # a whole sequence that does not count
    return values, rewards, mask


def sequences() -> list[slice]:
    edges = SHAPE["cu_seqlens"].tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def plain_gae(values: list[float], rewards: list[float]) -> list[float]:
    """The paper's sum, with no mask: A_t = sum_k (gamma lam)^k delta_t+k."""
    following = [*values[1:], 0.0][: len(values)]
    delta = [r + GAMMA * after - v for v, r, after in zip(values, rewards, following, strict=True)]
    return [sum((GAMMA * LAM) ** k * x for k, x in enumerate(delta[t:])) for t in range(len(delta))]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gae_is_the_paper_s_sum_over_what_is_left_when_masked_tokens_are_deleted(implementation: str) -> None:
    values, rewards, mask = random_tokens()
    found = gae(values, rewards, mask, gamma=GAMMA, lam=LAM, implementation=implementation, **SHAPE)
    for tokens in sequences():
        kept = mask[tokens]
        want = plain_gae(values[tokens][kept].tolist(), rewards[tokens][kept].tolist())
        advantages = torch.tensor(want, dtype=torch.float64)
        assert_equal_in_float64(found.advantages[tokens][kept], advantages, terms=2 * T)
        assert_equal_in_float64(found.returns[tokens][kept], advantages + values[tokens][kept], terms=2 * T)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_masked_token_gets_zeros(implementation: str) -> None:
    values, rewards, mask = random_tokens()
    found = gae(values, rewards, mask, gamma=GAMMA, lam=LAM, implementation=implementation, **SHAPE)
    assert not found.advantages[~mask].any() and not found.returns[~mask].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_discounted_return_passes_over_masked_tokens_undiscounted(implementation: str) -> None:
    _, rewards, mask = random_tokens()
    found = discounted_return(rewards, mask, gamma=GAMMA, implementation=implementation, **SHAPE)
    assert found[~mask].count_nonzero() == 0
    for tokens in sequences():
        kept = rewards[tokens][mask[tokens]]
        want = [sum(GAMMA**k * x for k, x in enumerate(kept[t:].tolist())) for t in range(len(kept))]
        exact = torch.tensor(want, dtype=torch.float64)
        assert_equal_in_float64(found[tokens][mask[tokens]], exact, terms=2 * T)


def test_several_turns_keep_the_reward_that_an_older_rule_dropped() -> None:
    rewards = torch.tensor([[0.0, 5.0, 5.0, 0.0, 1.0]])
    mask = torch.tensor([[1, 0, 0, 1, 1]])  # two tokens that a tool answered
    assert discounted_return(rewards, mask, gamma=0.5).tolist() == [[0.25, 0.0, 0.0, 0.5, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_scan_is_as_accurate_as_the_definition(dtype: torch.dtype) -> None:
    values, rewards, mask = random_tokens(dtype)

    def of(wide: torch.dtype, implementation: str) -> tuple[list[Tensor], Tensor]:
        options: dict[str, Any] = {"gamma": GAMMA, "implementation": implementation, **SHAPE}
        advantages = gae(values.to(wide), rewards.to(wide), mask, lam=LAM, **options)
        return list(advantages), discounted_return(rewards.to(wide), mask, **options)

    found = of(dtype, "scan")
    assert all(x.dtype == torch.float32 for x in (*found[0], found[1]))
    for sides in zip(found, of(dtype, "reference"), of(torch.float64, "reference"), strict=True):
        assert_as_accurate(*sides)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padded_batches_are_their_packed_ones(implementation: str) -> None:
    values, rewards = torch.randn(2, 5, 7, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([7, 3, 0, 1, 5])[:, None]
    edges = torch.tensor([0, 7, 10, 10, 11, 16], dtype=torch.int32)
    options = {"gamma": GAMMA, "implementation": implementation}
    padded = gae(values, rewards, mask, lam=LAM, **options)
    packed = gae(values[mask], rewards[mask], cu_seqlens=edges, lam=LAM, **options)
    for one, other in zip(padded, packed, strict=True):
        assert_equal_in_float64(one[mask], other, terms=16)
        assert one.shape == rewards.shape and one[~mask].count_nonzero() == 0
    returned = discounted_return(rewards, mask, **options)
    packed_return = discounted_return(rewards[mask], cu_seqlens=edges, **options)
    assert_equal_in_float64(returned[mask], packed_return, terms=16)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_masked_tokens_hold_has_no_influence(implementation: str) -> None:
    values, rewards, mask = random_tokens()
    options = {"gamma": GAMMA, "implementation": implementation, **SHAPE}
    want = gae(values, rewards, mask, lam=LAM, **options)
    want_return = discounted_return(rewards, mask, **options)
    values[~mask], rewards[~mask] = math.nan, math.inf
    for one, other in zip(gae(values, rewards, mask, lam=LAM, **options), want, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(discounted_return(rewards, mask, **options), want_return)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("edges", [[0], [0, 0, 0]])
def test_no_tokens_give_no_advantages(edges: list[int], implementation: str) -> None:
    options = {"cu_seqlens": torch.tensor(edges), "implementation": implementation}
    found = gae(torch.zeros(0), torch.zeros(0), **options)
    assert found.advantages.shape == found.returns.shape == (0,)
    assert discounted_return(torch.zeros(0), **options).shape == (0,)
    assert gae(torch.zeros(3, 0), torch.zeros(3, 0)).advantages.shape == (3, 0)


def test_laws_of_gae() -> None:
    values, rewards, mask = random_tokens()
    one_step = gae(values, rewards, mask, gamma=GAMMA, lam=0.0, **SHAPE)
    myopic = gae(values, rewards, mask, gamma=0.0, lam=LAM, **SHAPE)
    assert_equal_in_float64(myopic.advantages[mask], (rewards - values)[mask], terms=T)
    whole = gae(values, rewards, mask, gamma=GAMMA, lam=1.0, **SHAPE)
    returned = discounted_return(rewards, mask, gamma=GAMMA, **SHAPE)
    assert_equal_in_float64(whole.returns[mask], returned[mask], terms=2 * T)
    assert (one_step.advantages - whole.advantages).abs().max() > 1
    assert not gae(values.requires_grad_(), rewards, **SHAPE).returns.requires_grad


def test_a_million_tokens_in_one_sequence_stay_accurate() -> None:
    count = 2**20 + 1
    ones = torch.ones(1, count)
    gamma = 1 - 2**-10  # a float32
    k = torch.arange(count, 0, -1, dtype=torch.float64)
    found = discounted_return(ones, gamma=gamma)
    # The 1024 tokens that count: each is a product of factors and a sum.
    assert_within_rounding(found[0], (1 - gamma**k) / (1 - gamma), terms=2 * 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [1, 3000, 10**9], ids=["one token each", "thousands", "one sequence"])
def test_the_kernels_match_the_scan_in_float64_at_millions_of_tokens(longest: int) -> None:
    count = 2**22 + 77
    generator = torch.Generator("cuda").manual_seed(longest)
    values, rewards = torch.randn(2, count, generator=generator, device="cuda")
    mask = torch.rand(count, generator=generator, device="cuda") < 0.7
    lengths = torch.randint(1, min(longest, count) + 1, (count,), generator=generator, device="cuda")
    edges = torch.nn.functional.pad(lengths.cumsum(0).clamp(max=count).unique(), (1, 0)) if longest < count else None
    edges = torch.tensor([0, count], device="cuda") if edges is None else edges
    options: dict[str, Any] = {"gamma": 0.99, "cu_seqlens": edges}
    found = [
        [
            *gae(values, rewards, mask, lam=0.95, implementation="triton", **options),
            discounted_return(rewards, mask, implementation="triton", **options),
        ]
        for _ in range(2)
    ]
    scans = [
        [
            *gae(values.to(dtype), rewards.to(dtype), mask, lam=0.95, implementation="scan", **options),
            discounted_return(rewards.to(dtype), mask, implementation="scan", **options),
        ]
        for dtype in (torch.float32, torch.float64)
    ]
    for one, again, plain, exact in zip(*found, *scans, strict=True):
        assert torch.equal(one, again)
        assert_as_accurate(one, plain, exact)


def test_nothing_waits_for_the_device() -> None:
    """On the meta device no value can be read, so that whatever would wait raises."""
    values, rewards, mask = torch.randn(3, 12, device="meta")
    edges = torch.zeros(4, dtype=torch.int64, device="meta")
    assert gae(values, rewards, mask, cu_seqlens=edges).returns.shape == (12,)
    assert gae(values.view(3, 4), rewards.view(3, 4)).returns.shape == (3, 4)
    assert discounted_return(rewards, mask, cu_seqlens=edges).shape == (12,)
    assert masked_whiten(rewards, mask).shape == (12,)
    values.requires_grad_()
    value_loss(values, rewards, mask, old_values=values.detach(), clip=0.2).loss.backward()
    assert values.grad is not None
    with pytest.raises(NotImplementedError):
        gae(values, rewards, mask, cu_seqlens=edges, implementation="reference")


def test_reruns_are_bit_identical() -> None:
    values, rewards, mask = random_tokens(torch.float32)
    first, second = (gae(values, rewards, mask, gamma=GAMMA, lam=LAM, **SHAPE) for _ in range(2))
    assert torch.equal(first.advantages, second.advantages) and torch.equal(first.returns, second.returns)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gamma": 1.5}, r"gae: gamma must be in \[0, 1\]; got 1.5"),
        ({"lam": math.nan}, r"gae: lam must be in \[0, 1\]; got nan"),
        ({"rewards": torch.zeros(4)}, r"gae: rewards must have the shape of values, \[3\]; got \[4\]"),
        ({"mask": torch.ones(2)}, r"gae: mask must have the shape of values, \[3\]; got \[2\]"),
        ({"values": torch.zeros(3, dtype=torch.int64)}, "gae: values must be float32, .*; got torch.int64"),
        (
            {"rewards": torch.tensor([0.0, math.nan, 0.0])},
            r"rewards must be finite where a token counts; got nan at \[1\]",
        ),
        (
            {"cu_seqlens": None},
            r"gae: values must be \[N, L\], or packed \[T\] with cu_seqlens; got \[3\] and no cu_seq",
        ),
        ({"values": torch.zeros(1, 3), "rewards": torch.zeros(1, 3)}, r"got \[1, 3\] and cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 2])}, r"gae: cu_seqlens must rise from 0 to the 3 tokens; got \[0, 2\]"),
        ({"cu_seqlens": torch.tensor([0, 2, 1, 3])}, "gae: cu_seqlens must rise from 0"),
        (
            {"cu_seqlens": torch.tensor([0.0, 3.0])},
            r"gae: cu_seqlens must be \[N \+ 1\] integers; got \[2\] torch.float32",
        ),
        ({"rewards": torch.zeros(3, device="meta")}, "rewards is on meta but values is on cpu"),
        ({"implementation": "loop"}, "gae has no implementation 'loop'; registered: triton .*scan .*reference"),
    ],
)
def test_bad_input_of_gae_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"values": torch.zeros(3), "rewards": torch.zeros(3), "cu_seqlens": torch.tensor([0, 3])} | change
    with pytest.raises(InvalidInputError, match=message):
        gae(**arguments)


def test_bad_input_of_the_discounted_return_names_it() -> None:
    with pytest.raises(InvalidInputError, match=r"discounted_return: gamma must be in \[0, 1\]; got -1"):
        discounted_return(torch.zeros(1, 1), gamma=-1)
    with pytest.raises(InvalidInputError, match=r"discounted_return: rewards must be \[N, L\], or packed"):
        discounted_return(torch.zeros(3))
    with pytest.raises(
        InvalidInputError, match=r"discounted_return: mask must be 0 or .* for each token; got nan at \[0, 1\]"
    ):
        discounted_return(torch.zeros(1, 2), torch.tensor([[1.0, torch.nan]]))


def test_whitened_values_have_mean_zero_and_unbiased_variance_one() -> None:
    values, _, mask = random_tokens()
    values = values * 3 + 100
    values[~mask] = math.nan
    found = masked_whiten(values, mask)
    # The values are around 100, and the mean is rounded as they are.
    assert_within_rounding(found[mask].mean(), 0.0, terms=T, magnitude=values[mask].abs().max())
    assert_within_rounding(found[mask].var() * (1 + 1e-8 / values[mask].var()), 1.0, terms=4 * T)
    assert found[~mask].count_nonzero() == 0
    moved = masked_whiten(values, mask, keep_mean=True)
    assert_within_rounding(moved[mask].mean(), values[mask].mean(), terms=2 * T)
    assert moved[~mask].count_nonzero() == 0


@pytest.mark.parametrize("value", [0.1, 20.1, 12345.7])
def test_whitening_many_equal_values_gives_nothing(value: float) -> None:
    """A sum rounds by 1,000 roundings of a value at most. What is left of the mean is a rounding of that."""
    found = masked_whiten(torch.full((1000,), value), torch.ones(1000))
    assert_within_rounding(found, torch.zeros(1000), terms=1, magnitude=value * 1000 * 2**-23 / 1e-4)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_whitening_none_one_or_equal_values_gives_zeros(count: int) -> None:
    mask = torch.arange(4) < count
    # The mean is rounded, and what is left over it divided by the square root of epsilon.
    found = masked_whiten(torch.full((4,), 0.1), mask)
    assert_within_rounding(found, torch.zeros(4), terms=4, magnitude=0.1 / 1e-4)
    assert masked_whiten(torch.full((4,), 0.5), mask).count_nonzero() == 0


def test_bad_input_of_whitening_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"masked_whiten: mask must have the shape of values, \[3\]; got \[2\]"):
        masked_whiten(torch.zeros(3), torch.ones(2))
    with pytest.raises(InvalidInputError, match="masked_whiten: values must be float32"):
        masked_whiten(torch.zeros(3, dtype=torch.int64), torch.ones(3))
    with pytest.raises(
        InvalidInputError, match=r"masked_whiten: mask must be 0 or another number .*; got nan at \[1\]"
    ):
        masked_whiten(torch.zeros(2), torch.tensor([1.0, torch.nan]))


NUM_TOKENS = 200


def critic_tokens() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    values, returns, noise = torch.randn(3, NUM_TOKENS, generator=generator, dtype=torch.float64)
    return values.requires_grad_(), returns, values.detach() + noise * 0.3, torch.rand(NUM_TOKENS).double()


def test_the_value_loss_is_half_the_larger_squared_error_and_its_gradient_stops_beyond_the_clip() -> None:
    values, returns, old, weight = critic_tokens()
    loss, stats = value_loss(values, returns, weight, old_values=old, clip=0.2)
    v = values.detach()
    clipped = torch.clamp(v, old - 0.2, old + 0.2)
    errors = torch.stack(((v - returns) ** 2, (clipped - returns) ** 2))
    assert_equal_in_float64(loss, (0.5 * errors.amax(0) * weight).sum(), terms=NUM_TOKENS)
    passes = (errors[0] >= errors[1]) | ((v - old).abs() <= 0.2)
    gradient = torch.autograd.grad(loss, values)[0]
    assert_equal_in_float64(gradient, weight * (v - returns) * passes, terms=4)
    share = (weight * (errors[1] > errors[0])).sum() / weight.sum()
    assert_equal_in_float64(stats["value_clip_mean"], share, terms=NUM_TOKENS)
    assert_equal_in_float64(stats["return_mean"], (weight * returns).sum() / weight.sum(), terms=NUM_TOKENS)
    assert 0 < share < 1 and not passes.all()


def test_the_value_loss_matches_finite_differences() -> None:
    values, returns, old, weight = (x[:40] for x in critic_tokens())

    def loss(values: Tensor) -> Tensor:
        return value_loss(values, returns, weight, old_values=old, clip=0.2).loss

    assert torch.autograd.gradcheck(loss, values.detach().requires_grad_())


def test_without_a_clip_the_value_loss_is_half_the_squared_error() -> None:
    values, returns, _, weight = critic_tokens()
    loss, stats = value_loss(*(x.view(20, -1) for x in (values, returns, weight)))
    assert_equal_in_float64(loss, (0.5 * weight * (values - returns) ** 2).sum(), terms=NUM_TOKENS)
    assert stats["value_clip_mean"] == 0 and not stats["value_mean"].requires_grad


def test_a_token_of_weight_zero_has_no_part_in_the_value_loss() -> None:
    values, returns, old, weight = critic_tokens()
    weight[::3] = 0
    want = value_loss(values, returns, weight, old_values=old, clip=0.2)
    want_gradient = torch.autograd.grad(want.loss, values)[0]
    is_masked = weight == 0
    dirty = values.detach().masked_fill(is_masked, math.nan).requires_grad_()
    returns, old = (x.masked_fill(is_masked, math.inf) for x in (returns, old))
    found = value_loss(dirty, returns, weight, old_values=old, clip=0.2)
    assert torch.equal(found.loss, want.loss) and torch.equal(torch.autograd.grad(found.loss, dirty)[0], want_gradient)
    assert_equal_in_float64(found.stats, want.stats, terms=NUM_TOKENS)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"clip": 0.2}, "value_loss: clip and old_values go together; got clip=0.2, old_values not given"),
        ({"old_values": torch.zeros(3)}, "clip and old_values go together; got clip=None, old_values given"),
        ({"clip": -1.0, "old_values": torch.zeros(3)}, "value_loss: clip must be a finite number > 0; got -1.0"),
        ({"returns": torch.zeros(2)}, r"value_loss: returns must be of the shape of values = \[3\]; got \[2\]"),
        ({"returns": torch.zeros(3, requires_grad=True)}, r"value_loss: returns requires grad, .*\.detach\(\)"),
        ({"token_weight": torch.ones(3, dtype=torch.int64)}, "value_loss: token_weight must be float32"),
        ({"token_weight": torch.ones(3, device="meta")}, "token_weight is on meta but values is on cpu"),
    ],
)
def test_bad_input_of_the_value_loss_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"values": torch.zeros(3), "returns": torch.zeros(3), "token_weight": torch.ones(3)} | change
    with pytest.raises(InvalidInputError, match=message):
        value_loss(**arguments)
