"""Each row of the table in docs/losses.md, as it stands there, against the formula of the peer it names.

The peers' formulas are written over padded [N, L] batches and differentiated by autograd.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore.ops
from rlcore.ops import token_weights
from tests.accuracy import assert_within_rounding
from tests.kernels.plain import assert_equal_in_float64

P, n, L = 4, 3, 8
N, L_MAX = P * n, 16
NAMES = {name: getattr(rlcore.ops, name) for name in rlcore.ops.__all__} | {"inf": math.inf}


class Batch:
    """Log-probabilities, masks and rewards [N, L] float64 of N responses to P prompts."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(21)

        def normal(scale: float, *shape: int) -> Tensor:
            return torch.randn(shape or (N, L), generator=generator, dtype=torch.float64) * scale

        length = torch.randint(1, L + 1, (N,), generator=generator)
        self.is_present = torch.arange(L) < length[:, None]
        self.m = self.is_present & (torch.rand(N, L, generator=generator) < 0.8)
        self.m[:, 0] = True
        self.old = -0.2 - normal(1.0).abs()
        self.x = (self.old + normal(0.2)).requires_grad_()
        self.ref, self.rollout = self.old + normal(0.3), self.old + normal(0.2)
        self.R = normal(1.0, P, n).float()
        last = self.m * torch.arange(1, L + 1)
        self.r = torch.zeros(N, L).scatter_(1, last.argmax(1, keepdim=True), self.R.view(-1, 1)).double()
        self.V, self.v = normal(0.5), normal(0.5).requires_grad_()

    @property
    def count(self) -> Tensor:
        return self.m.sum(1, keepdim=True)

    @property
    def ratio(self) -> Tensor:
        return (self.x - self.old).exp()

    def clipped(self, A: Tensor, low: float, high: float, ratio: Tensor | None = None) -> Tensor:
        ratio = self.ratio if ratio is None else ratio
        return -torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)

    def k3(self) -> Tensor:
        d = self.ref - self.x
        return d.exp() - d - 1

    def sequence_mean(self, values: Tensor) -> Tensor:
        return (values * self.m).sum(1, keepdim=True) / self.count


# ----------------------------------------------------------------------------------- advantages, [N, 1] or [N, L]


def by_group(batch: Batch, one: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([one(rewards) for rewards in batch.R.double()]).view(N, 1)


def grpo_advantage(batch: Batch, epsilon: float = 1e-6) -> Tensor:
    return by_group(batch, lambda R: (R - R.mean()) / (R.std() + epsilon))


def centred(batch: Batch) -> Tensor:
    return by_group(batch, lambda R: R - R.mean())


def leave_one_out(batch: Batch) -> Tensor:
    return by_group(batch, lambda R: torch.stack([R[i] - (R.sum() - R[i]) / (n - 1) for i in range(n)]))


def opo_advantage(batch: Batch) -> Tensor:
    length = batch.count.view(P, n).double()
    baseline = (length * batch.R).sum(1) / length.sum(1)
    return (batch.R - baseline[:, None]).view(N, 1)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    counted = values[mask]
    return (values - counted.mean()) * (counted.var() + 1e-8).rsqrt()


def returns_of(batch: Batch) -> Tensor:
    found = torch.zeros(N, L, dtype=torch.float64)
    for i in range(N):
        carry = 0.0
        for t in reversed(range(L)):
            carry = batch.r[i, t].item() + carry if batch.m[i, t] else carry
            found[i, t] = carry
    return found


def gae_of(batch: Batch, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    advantage = torch.zeros(N, L, dtype=torch.float64)
    for i in range(N):
        carry = following = 0.0
        for t in reversed(range(L)):
            if batch.m[i, t]:
                carry = batch.r[i, t].item() + following - batch.V[i, t].item() + lam * carry
                following = batch.V[i, t].item()
            advantage[i, t] = carry
    return whitened(advantage, batch.m), advantage + batch.V


# -------------------------------------------------------------------------------------------------- aggregation


def token_mean(batch: Batch, values: Tensor) -> Tensor:
    return (values * batch.m).sum() / batch.m.sum()


def sequence_mean_of_means(batch: Batch, values: Tensor) -> Tensor:
    return batch.sequence_mean(values).mean()


def sequence_mean_of_sums(batch: Batch, values: Tensor) -> Tensor:
    return (values * batch.m).sum(1).mean()


def constant_norm(batch: Batch, values: Tensor) -> Tensor:
    return (values * batch.m).sum() / (N * L_MAX)


# --------------------------------------------------------------------------------------------- peers' losses


def grpo(b: Batch) -> Tensor:
    return sequence_mean_of_means(b, b.clipped(grpo_advantage(b), 0.2, 0.2) + 0.04 * b.k3())


def gspo(b: Batch) -> Tensor:
    s = b.sequence_mean(b.x - b.old).exp()
    return b.clipped(grpo_advantage(b), 3e-4, 4e-4, s).mean()


def gspo_token(b: Batch) -> Tensor:
    s = (b.sequence_mean(b.x - b.old).detach() + b.x - b.x.detach()).exp()
    return sequence_mean_of_means(b, b.clipped(grpo_advantage(b), 3e-4, 4e-4, s))


def gmpo(b: Batch) -> Tensor:
    A = grpo_advantage(b)
    sign = A.sign()
    d = b.x - b.old
    clipped = sign * torch.minimum(sign * d, sign * d.clamp(-0.4, 0.4))
    return (-A * b.sequence_mean(clipped).exp()).mean()


def cispo(b: Batch, highest: float, epsilon: float = 1e-6) -> Tensor:
    return token_mean(b, -b.ratio.clamp(max=highest).detach() * grpo_advantage(b, epsilon) * b.x)


def sapo(b: Batch) -> Tensor:
    A = grpo_advantage(b)
    temperature = torch.where(A > 0, 1.0, torch.full_like(A, 1.05))
    return sequence_mean_of_means(b, -A * 4 / temperature * torch.sigmoid(temperature * (b.ratio - 1)))


def dppo(b: Batch) -> Tensor:
    A, moved = centred(b), (b.x.exp() - b.old.exp()).detach()
    valid = torch.where(A > 0, moved <= 0.15, moved >= -0.15)
    return constant_norm(b, -A * b.ratio.clamp(max=20).detach() * b.x * valid)


def cpgd(b: Batch) -> Tensor:
    A = grpo_advantage(b)
    bound = torch.where(A > 0, torch.minimum(b.x, b.old + math.log(1.28)), torch.maximum(b.x, b.old + math.log(0.8)))
    drift = (b.ratio.detach() - 1).clamp(max=2)
    return token_mean(b, -A * bound + 0.001 * drift * b.x)


def reinforce_plus_plus_baseline(b: Batch) -> Tensor:
    A = whitened(centred(b).expand(N, L), b.m)
    return token_mean(b, b.clipped(A, 0.2, 0.2) + 0.001 * (b.x - b.ref) ** 2 / 2)


def weighted(b: Batch, weight: Tensor, coef: float = 0.0) -> Tensor:
    return token_mean(b, weight * b.clipped(grpo_advantage(b), 0.2, 0.2) + coef * b.k3())


def mismatch(b: Batch) -> Tensor:
    return (b.old - b.rollout).exp()


def seq_mask_tis(b: Batch) -> Tensor:
    geometric = b.sequence_mean(b.old - b.rollout).exp()
    return weighted(b, mismatch(b) * ((geometric >= 0.9) & (geometric <= 1.1)))


def luspo(b: Batch) -> Tensor:
    s = b.sequence_mean(b.x - b.old).exp()
    return (b.count * b.clipped(grpo_advantage(b), 3e-4, 4e-4, s)).mean()


def vespo(b: Batch) -> Tensor:
    A = grpo_advantage(b)
    W = ((b.x - b.old) * b.m).sum(1, keepdim=True).detach().exp()
    k, rate = torch.where(A >= 0, 2.0, 3.0).double(), torch.where(A >= 0, 3.0, 2.0).double()
    return token_mean(b, -(rate + k * W.log() - rate * W).exp() * A * b.x)


def opsm(b: Batch) -> Tensor:
    A = grpo_advantage(b)
    delta = 1e-4
    kept = (A >= 0) | (b.sequence_mean(b.old - b.x) <= delta)
    return token_mean(b, kept.detach() * b.clipped(A, 0.2, 0.2))


PEERS: dict[str, Callable[[Batch], Tensor]] = {
    "GRPO": grpo,
    "Dr. GRPO": lambda b: constant_norm(b, b.clipped(centred(b), 0.2, 0.2)),
    "DAPO": lambda b: token_mean(b, b.clipped(grpo_advantage(b), 0.2, 0.28)),
    "GSPO": gspo,
    "GSPO-token": gspo_token,
    "GMPO": gmpo,
    "LUSPO": luspo,
    "VESPO": vespo,
    "GRPO with OPSM": opsm,
    "GRPO on policy": lambda b: token_mean(b, b.clipped(grpo_advantage(b), 0.2, 0.2, (b.x - b.x.detach()).exp())),
    "CISPO": lambda b: cispo(b, 1.28),
    "CISPO of TRL": lambda b: cispo(b, 5.0, 1e-4),
    "SAPO": sapo,
    "DPPO": dppo,
    "CPGD": cpgd,
    "RLOO": lambda b: sequence_mean_of_sums(b, -leave_one_out(b) * b.x),
    "OPO": lambda b: token_mean(b, -opo_advantage(b) * b.x),
    "REINFORCE++": lambda b: token_mean(b, b.clipped(whitened(returns_of(b), b.m), 0.2, 0.2)),
    "REINFORCE++ baseline": reinforce_plus_plus_baseline,
    "PPO with a critic": lambda b: token_mean(b, b.clipped(gae_of(b)[0], 0.2, 0.2)),
    "Decoupled PPO (AReaL)": lambda b: weighted(b, mismatch(b) * (mismatch(b) <= 5)),
    "GRPO with TIS": lambda b: weighted(b, mismatch(b).clamp(max=2), 0.001),
    "GRPO with IcePop": lambda b: weighted(b, mismatch(b) * ((mismatch(b) >= 0.5) & (mismatch(b) <= 5))),
    "GRPO with seq-mask-TIS": seq_mask_tis,
}


def documented() -> dict[str, tuple[list[str], str, str]]:
    """The first code of each cell of the table of recipes, all of the loss cell's, by recipe."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+) \| ([^|]+) \| `([\w-]+)` \|$", text, re.MULTILINE)
    return {
        name: (re.findall(r"`([^`]+)`", loss), re.findall(r"`([^`]+)`", advantage)[0], mode)
        for name, loss, advantage, mode in rows
    }


def run_documented(name: str, batch: Batch) -> Tensor:
    """Return the values whose sum is the loss."""
    (loss, *_), advantage, mode = documented()[name]
    entries = {"R": batch.R, "r": batch.r, "V": batch.V, "m": batch.m, "n": batch.count.view(P, n)}
    A = eval(advantage, NAMES | entries)
    A = A.view(N, 1).expand(N, L) if A.shape == (P, n) else A
    packed = batch.is_present
    edges = torch.nn.functional.pad(packed.sum(1).cumsum(0), (1, 0))
    per_token = {
        "old_logprobs": batch.old[packed],
        "ref_logprobs": batch.ref[packed],
        "rollout_logprobs": batch.rollout[packed],
        "advantages": A.double()[packed],
        "cu_seqlens": edges,
        "token_mask": batch.m[packed],
    }
    value, _ = eval(loss, dict(NAMES))(batch.x[packed], None, per_token)
    options: dict[str, Any] = {"max_length": L_MAX} if mode == "seq-mean-token-sum-norm" else {}
    weight = token_weights(mode, batch.m[packed], cu_seqlens=edges, **options)
    return torch.where(batch.m[packed], value, 0.0) * weight


def test_every_documented_recipe_has_its_peer_here() -> None:
    assert documented().keys() == PEERS.keys()


@pytest.mark.parametrize("name", PEERS)
def test_a_documented_recipe_is_the_peer_s_formula(name: str) -> None:
    batch = Batch()
    parts, want = run_documented(name, batch), PEERS[name](batch)
    # Advantages and weights are float32; some advantages are of sums over all tokens. That an epsilon is 1e-6 where the
    # peer's is 1e-8 changes less.
    rounding: dict[str, Any] = {"terms": N * L, "dtype": torch.float32}
    assert_within_rounding(parts.sum(), want, magnitude=parts.abs().sum(), **rounding)
    gradient, want_gradient = (torch.autograd.grad(loss, batch.x)[0] for loss in (parts.sum(), want))
    assert want_gradient.any()
    assert_within_rounding(gradient, want_gradient, magnitude=want_gradient.abs().max(), **rounding)


def test_the_documented_critic_is_the_peer_s_formula() -> None:
    batch = Batch()
    returns = rlcore.ops.gae(batch.V, batch.r, batch.m, lam=0.95).returns
    assert_equal_in_float64(returns[batch.m], gae_of(batch)[1][batch.m], terms=3 * L)
    entries = {"v": batch.v, "V": batch.V, "returns": returns, "w": token_weights("token-mean", batch.m)}
    found = eval(documented()["PPO with a critic"][0][1], NAMES | entries).loss
    clipped = torch.clamp(batch.v, batch.V - 0.5, batch.V + 0.5)
    R = gae_of(batch)[1]
    want = 0.5 * token_mean(batch, torch.maximum((batch.v - R) ** 2, (clipped - R) ** 2))
    assert_within_rounding(found, want, terms=2, dtype=torch.float32)  # the weights are
    gradient, want_gradient = (torch.autograd.grad(loss, batch.v)[0] for loss in (found, want))
    assert_within_rounding(gradient, want_gradient, terms=2, dtype=torch.float32)


# ------------------------------------------------------------------------------- the table of aggregation modes


def assert_mean(found: Tensor, exact: Tensor, values: Tensor) -> None:
    """A weighted sum of float32 values is their mean, but for rounding each product and the sum."""
    assert_within_rounding(found, exact, terms=2 * values.numel(), magnitude=values.abs().max())


def test_ranks_that_average_gradients_of_unequal_token_counts_give_the_global_token_mean() -> None:
    values, mask = torch.randn(6, 5), torch.rand(6, 5) < 0.5
    total, ranks = mask.sum(), (slice(0, 1), slice(1, 6))
    parts = [(token_weights("token-mean", mask[rows], total=total) * values[rows]).sum() for rows in ranks]
    assert_mean(sum(2 * part for part in parts) / 2, values[mask].double().mean(), values)


def test_bnpo_is_the_token_mean_of_each_micro_batch_by_itself() -> None:
    values, mask = torch.randn(6, 5), torch.rand(6, 5) < 0.5
    mask[:, 0] = True
    micro = (slice(0, 2), slice(2, 6))
    parts = [(token_weights("token-mean", mask[rows]) * values[rows]).sum() / 2 for rows in micro]
    want = sum(values[rows][mask[rows]].double().mean() / 2 for rows in micro)
    assert_mean(sum(parts), want, values)


def test_trl_counts_fully_masked_rows_and_verl_does_not() -> None:
    values, mask = torch.randn(3, 4), torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    means = (values * mask).double().sum(1) / mask.sum(1).clamp(min=1)
    weight = token_weights("seq-mean-token-mean", mask, total=3)
    assert_mean((weight * values).sum(), means.mean(), values)
    assert_mean((token_weights("seq-mean-token-mean", mask) * values).sum(), means.sum() / 2, values)


def test_the_denominator_of_decoupled_ppo_counts_what_it_rejects() -> None:
    batch = Batch()
    keep = mismatch(batch) <= 1.05
    A = grpo_advantage(batch)
    term = rlcore.ops.decoupled_ppo(clip_high=0.2, weight_high=1.05)
    per_token = {"old_logprobs": batch.old, "rollout_logprobs": batch.rollout, "advantages": A.expand(N, L)}
    value, _ = term(batch.x, None, per_token)
    parts = value * token_weights("token-mean", batch.m)
    kept = mismatch(batch) * keep * batch.clipped(A, 0.2, 0.2) * batch.m
    magnitude = parts.abs().sum()
    assert_within_rounding(
        parts.sum(), kept.sum() / batch.m.sum(), terms=2, magnitude=magnitude, dtype=torch.float32
    )  # the weights are
    assert 0 < (keep & batch.m).sum() < batch.m.sum()
