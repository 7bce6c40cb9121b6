"""``rlcore ops explain`` asks what the operators ask, and refuses what they could not be asked."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from rlcore.cli.explanation import OPTIONS, explain
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.kernels.dispatch import choose
from rlcore.kernels.linear.problem import HeadInputs, LinearHeadProblem
from rlcore.kernels.returns import group_advantage as advantages
from rlcore.kernels.token.problem import LogitsProblem
from rlcore.packed.attention import packed_hidden_states
from rlcore.registry import registry


def asked(op: str, *options: str, **changes: Any) -> Any:
    usual = {"device": "cpu", "dtype": "float32", "hidden_size": 64, "vocab_size": 100, "implementation": None}
    return explain(op, options=options, **usual | changes)


def test_every_operator_of_rlcore_has_its_options() -> None:
    """Those that devices register stand in for what torch and models do by themselves."""
    own = {op for op, entries in registry().ops.items() if any(entry.path.startswith("rlcore.") for entry in entries)}
    assert own == OPTIONS.keys()


def test_the_options_are_those_that_operators_ask_with(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = None
    logits = torch.zeros(2, 3)
    shard: Any = object()
    both: Any = {"with_entropy": True, "shard": shard}
    problem = LogitsProblem(rows, keep_mask=logits, inplace_backward=True, row_stats=("is_top1",), **both)
    assert problem.query(logits).options == OPTIONS["token_logprob"]
    head = LinearHeadProblem(rows, softcap=1.0, memory_budget_bytes=1, **both)
    inputs = HeadInputs(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3))
    assert head.query(inputs, "sequence_level").options == OPTIONS["linear_loss"]
    scored = dataclasses.replace(head, row_stats=("is_top1",))
    assert scored.query(inputs).options == OPTIONS["linear_logprob"]
    queries: list[Any] = []
    monkeypatch.setattr(advantages, "choose", lambda op, query, *rest: queries.append(query) or choose(op, query))
    for mode in advantages.MODES:
        lengths = torch.ones(2, 4, dtype=torch.int64) if mode in ("opo", "reinforce++") else None
        advantages.group_advantage(torch.rand(2, 4), mode=mode, lengths=lengths)
    advantages.group_advantage(torch.rand(4), group=torch.tensor([0, 0, 1, 1]))
    advantages.group_advantage(torch.rand(1, 100_000))
    assert frozenset().union(*(query.options for query in queries)) == OPTIONS["group_advantage"]


@pytest.mark.parametrize(
    ("op", "option", "told"),
    [
        (
            "linear_loss",
            "entropi",
            "--option must be one of bias, entropy, group, memory_budget, sequence_level, softcap for linear_loss, "
            "got 'entropi'; did you mean 'entropy'?",
        ),
        ("gae", "entropy", "--option must be left out for gae, got 'entropy'"),
        ("packed_attention", "mask", "--option must be one of dropout, long, sinks, softcap, window for packed_att"),
    ],
)
def test_an_option_that_the_operator_does_not_have_is_refused(op: str, option: str, told: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{re.escape(told)}"):
        asked(op, option)


def test_where_no_device_has_a_norm_the_modules_own_runs() -> None:
    found = asked("rms_norm")
    assert found.implementation == "the module's own forward"
    assert found.refused == (("npu_rms_norm", "it is for device type 'npu', not 'cpu'"),)


@pytest.mark.parametrize("dtype", ["int8", "complex64", "float8_e4m3fn", "bf16", "nn", ""])
def test_a_dtype_that_no_operator_takes_is_refused(dtype: str) -> None:
    told = f"--dtype must be one of float32, bfloat16, float16, float64, got {dtype!r}"
    with pytest.raises(InvalidInputError, match=f"^{re.escape(told)}$"):
        asked("token_logprob", dtype=dtype)


def test_packed_attention_is_told_as_it_runs() -> None:
    from transformers import Qwen2Config, Qwen2Model

    found = asked("packed_attention")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8}
    decoder = Qwen2Model(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
    input_ids, cu_seqlens = torch.arange(6), torch.tensor([0, 2, 6], dtype=torch.int32)
    told = dict(asked("packed_attention", "long").refused)  # by name, it is asked as for packs that are long
    for implementation in (found.implementation, *(name for name, _ in found.refused)):
        is_chosen = implementation == found.implementation
        try:
            packed_hidden_states(decoder, input_ids, cu_seqlens, implementation=implementation)
            assert is_chosen
        except UnsupportedError as error:
            assert not is_chosen and told[implementation] in str(error)
    with pytest.raises(InvalidInputError, match=r"packed attention has flash_attention_3, .*; got 'magic'"):
        asked("packed_attention", implementation="magic")
