"""An operator names an argument that is no tensor, no number or no loss function, before any work."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch

from rlcore import ops
from rlcore.errors import InvalidInputError

HIDDEN, WEIGHT, TARGETS, ONES = (
    torch.randn(5, 8, requires_grad=True),
    torch.randn(11, 8),
    torch.arange(5),
    torch.ones(5),
)
EDGES = torch.tensor([0, 5])
A_LOSS = r"a function of \(logprob, entropy, per_token\), such as ppo_clip\(\),"
PAIR = r"must return \(value, stats\), a vector and a dict of vectors to report, {} for none; got "

IGNORE_INDEX = "^ignore_index must be a whole number of 64 bits, such as -100; got "


def loss(**changed: Any) -> Any:
    per_token = {"old_logprobs": -ONES, "advantages": ONES}
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS, "per_token": per_token, "token_weight": ONES}
    return ops.linear_loss(**{**arguments, "loss_fn": ops.ppo_clip(), **changed})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loss(hidden=numpy.ones((5, 8))), "hidden must be a tensor; got ndarray$"),
        (lambda: loss(weight=None), "weight must be a tensor; got NoneType$"),
        (lambda: loss(targets=[0] * 500), r"takes a tensor as targets, got \[0, .*\.\.\. of <class 'list'>$"),
        (
            lambda: loss(weight=WEIGHT.to("meta")),
            r"^weight is on meta but hidden is on cpu; move it with \.to\(hidden\.dev",
        ),
        (
            lambda: loss(token_weight=ONES.clone().requires_grad_()),
            r"no gradient flows to it; pass token_weight\.detach",
        ),
        (lambda: loss(bias=[1.0]), r"^linear_loss takes a tensor, or None as bias, got \[1\.0\]$"),
        (lambda: loss(loss_fn=None), f"^linear_loss takes {A_LOSS} as loss_fn, got None$"),
        (lambda: loss(loss_fn=ops.ppo_clip), f"{A_LOSS} as loss_fn, got <function ppo_clip"),
        (lambda: loss(loss_fn=lambda logprob, entropy: logprob), f"{A_LOSS} as loss_fn, got <function"),
        (lambda: loss(loss_fn=lambda logprob, *_: logprob), f"^loss function .*<lambda> {PAIR}Tensor$"),
        (lambda: loss(loss_fn=lambda logprob, *_: (logprob, None)), PAIR + r"\['Tensor', 'NoneType'\]$"),
        (lambda: loss(loss_fn=lambda logprob, *_: (logprob, {}, 1)), PAIR + r"\['Tensor', 'dict', 'int'\]$"),
        (lambda: loss(loss_fn=lambda logprob, *_: (logprob, {1: logprob})), "statistic 1 must end in one of _mean"),
        (lambda: loss(per_token=None), "takes a mapping of names to tensors as per_token, got None$"),
        (lambda: loss(per_token={"a": [1.0] * 5}), r"^per_token\['a'\] must be a tensor; got list$"),
        (lambda: loss(token_weight=None), "takes a tensor as token_weight, got None$"),
        (lambda: loss(ignore_index=None), "takes a whole number as ignore_index, got None$"),
        (lambda: loss(temperature="1"), "^temperature must be a finite number > 0; got '1'$"),
        (lambda: loss(softcap="x"), "^softcap must be a finite number > 0; got 'x'$"),
        (lambda: loss(memory_budget_bytes="1 GiB"), "^memory_budget_bytes must be a finite number > 0; got '1 GiB'$"),
        (lambda: loss(memory_budget_bytes=-1), "^memory_budget_bytes must be a finite number > 0; got -1$"),
        (lambda: loss(loss_fn=ops.gspo(), cu_seqlens=[0, 5]), "takes a tensor, or None as cu_seqlens, got"),
        (lambda: loss(loss_fn=ops.gspo(), cu_seqlens=EDGES.float()), r"must be \[N \+ 1\] integers; got \[2\] torch.f"),
        (lambda: ops.linear_logprob([[1.0]], WEIGHT, TARGETS), "^hidden must be a tensor; got list$"),
        (lambda: ops.linear_logprob(HIDDEN, WEIGHT, [0] * 5), "^targets must be a tensor; got list$"),
        (lambda: ops.linear_logprob(HIDDEN, WEIGHT, TARGETS, logit_scale=None), "^logit_scale must be a finite num"),
        (lambda: ops.linear_logprob(HIDDEN, WEIGHT, TARGETS, ignore_index="x"), IGNORE_INDEX + "'x'$"),
        (
            lambda: ops.linear_logprob(HIDDEN, WEIGHT, TARGETS, ignore_index=1.5, temperature=ONES),
            IGNORE_INDEX + "1.5$",
        ),
        (lambda: ops.token_logprob(WEIGHT[:5], TARGETS, ignore_index=None), IGNORE_INDEX + "None$"),
        (lambda: loss(with_entropy="yes"), "^with_entropy must be True or False; got 'yes'$"),
        (
            lambda: ops.linear_logprob(HIDDEN, WEIGHT, TARGETS, with_entropy=1),
            "^with_entropy must be True or False; got 1$",
        ),
        (
            lambda: ops.token_logprob(WEIGHT[:5], TARGETS, with_entropy=None),
            "^with_entropy must be True or F.* got None",
        ),
        (lambda: ops.token_logprob(WEIGHT[:5], TARGETS, inplace_backward="no"), "^inplace_backward must be True or"),
        (lambda: ops.token_logprob(WEIGHT[:5], TARGETS, ignore_index=2**63), IGNORE_INDEX + "9223372036854775808$"),
        (lambda: loss(temperature=True), "^temperature must be a finite number > 0; got True$"),
        (lambda: loss(softcap=ONES[0]), r"^softcap must be a finite number > 0; got tensor\(1.\)$"),
        (lambda: loss(logit_scale=ONES[0]), r"^logit_scale must be a finite number > 0; got tensor\(1.\)$"),
        (lambda: loss(memory_budget_bytes=True), "^memory_budget_bytes must be a finite number > 0; got True$"),
        (
            lambda: loss(weight=WEIGHT.to_sparse()),
            r"^weight must be dense; got torch.sparse_coo: pass its to_dense\(\)$",
        ),
        (lambda: ops.token_logprob([[1.0]], TARGETS), "^logits must be a tensor; got list$"),
        (lambda: ops.token_logprob(WEIGHT[:5], [0] * 5), "^targets must be a tensor; got list$"),
        (lambda: ops.token_logprob(WEIGHT[:5], TARGETS, temperature=None), "^temperature must be a finite number > 0;"),
        (lambda: ops.gae([1.0], ONES, cu_seqlens=EDGES), "^gae: values must be a tensor; got list$"),
        (lambda: ops.gae(ONES, ONES, cu_seqlens=[0, 5]), "^gae takes a tensor, or None as cu_seqlens, got"),
        (lambda: ops.gae(ONES, ONES, gamma="1", cu_seqlens=EDGES), "^gae takes a number as gamma, got '1'$"),
        (lambda: ops.discounted_return(ONES, [1], cu_seqlens=EDGES), "^discounted_return takes a tensor, or None as m"),
        (lambda: ops.masked_whiten(ONES, None), "^masked_whiten takes a tensor as mask, got None$"),
        (
            lambda: ops.masked_whiten(ONES, ONES, keep_mean="yes"),
            "^masked_whiten takes True or False as keep_mean, got",
        ),
        (lambda: ops.position_ids([0, 5]), r"^position_ids takes a tensor as cu_seqlens, got \[0, 5\]$"),
        (
            lambda: ops.inverse_permutation("01"),
            "^inverse_permutation takes lists of indices in a list as bins, got '01'$",
        ),
        (
            lambda: ops.token_loss(-ONES, ops.ppo_clip(), per_token={}, token_weight=ONES, cu_seqlens=[0, 5]),
            r"^token_loss takes a tensor, or None as cu_seqlens, got \[0, 5\]$",
        ),
        (lambda: ops.token_weights("token-mean", [[1]]), "^token_weights takes a tensor as mask, got"),
        (lambda: ops.inverse_permutation([0, 1]), r"lists of indices in a list as bins, got \[0, 1\]$"),
        (lambda: ops.token_weights("token-mean", ONES, total="3"), "a finite number of at least 0, or a tensor of"),
        (lambda: ops.token_weights("token-mean", ONES, total=-5), "as total, got -5$"),
        (lambda: ops.token_weights("token-mean", ONES, total=math.nan), "as total, got nan$"),
        (lambda: ops.token_weights("token-mean", ONES, total=ONES), "or a tensor of one, or None as total, got tensor"),
        (lambda: ops.masked_whiten(ONES, ONES, epsilon=-1.0), "finite number of at least 0 as epsilon, got -1.0$"),
        (lambda: ops.group_advantage(ONES, epsilon=math.nan), "finite number of at least 0 as epsilon, got nan$"),
        (lambda: ops.group_advantage(ONES, group_size=True), "takes a whole number, or None as group_size, got True"),
        (lambda: ops.pack(None), "^pack takes a mapping of names to tensors as batch, got None$"),
        (lambda: ops.unpack(None), "^unpack takes a mapping of names to tensors as batch, got None$"),
        (
            lambda: ops.balance(None, num_bins=2),
            "^balance takes whole numbers in a list, array or tensor as lengths, got N",
        ),
        (lambda: ops.ppo_clip(clip_low=Fraction(1, 5)), r"^ppo_clip takes a number as clip_low, got Fraction\(1, 5\)$"),
        (lambda: ops.ppo_clip(clip_low="a"), "^ppo_clip takes a number as clip_low, got 'a'$"),
        (lambda: ops.gspo(clip_high=None), "^gspo takes a number as clip_high, got None$"),
        (lambda: ops.cpgd(drift_coef="0"), "^cpgd takes a number as drift_coef, got '0'$"),
        (lambda: ops.sapo(temperature_positive=None), "^sapo takes a number as temperature_positive, got None$"),
        (lambda: ops.dppo(kind=["tv"]), "^dppo takes a str as kind, got"),
        (lambda: ops.cispo_absolute(max_ratio=None), "^cispo_absolute takes a number as max_ratio, got None$"),
        (lambda: ops.decoupled_ppo(weight_high="5"), "^decoupled_ppo takes a number as weight_high, got '5'$"),
        (lambda: ops.decoupled_ppo(clip_low="5"), "^ppo_clip takes a number as clip_low, got '5'$"),
        (lambda: ops.kl(kind=["k1"], coef=1), "^kl takes a str as kind, got"),
        (lambda: ops.kl(coef=math.nan), "^kl: coef must be a finite number; got nan$"),
        (lambda: ops.entropy_bonus(coef=None), "^entropy_bonus takes a number as coef, got None$"),
        (lambda: ops.combine(ops.ppo_clip(), ops.kl), f"^combine takes {A_LOSS} as term 1, got <function kl"),
        (lambda: ops.tis(None), f"^tis takes {A_LOSS} as term, got None$"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call()


def test_numbers_of_numpy_and_budgets_in_floats_are_numbers() -> None:
    terms = ops.combine(ops.ppo_clip(clip_low=numpy.float64(0.2)), ops.kl(coef=numpy.float64(0)))
    per_token = {"old_logprobs": -ONES, "ref_logprobs": -ONES, "advantages": ONES}
    found = loss(loss_fn=terms, per_token=per_token, temperature=numpy.float32(1), memory_budget_bytes=0.5 * 2**20)
    assert torch.equal(found.loss, loss().loss), "a penalty times 0 is 0"
    assert ops.gae(ONES, ONES, gamma=numpy.float32(1), cu_seqlens=EDGES).returns[0] == 5
    assert ops.balance(numpy.array([1, 2]), max_tokens=numpy.int64(3)) == [[0, 1]]
