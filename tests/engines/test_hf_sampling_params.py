from __future__ import annotations

from typing import Any

import pytest

from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import InvalidInputError


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.max_tokens, params.seed) == (
        1,
        1.0,
        1.0,
        16,
        None,
    )
    assert not params.ignore_eos and not params.restricts_tokens and not params.is_greedy


def test_a_mapping_none_and_an_instance_are_accepted() -> None:
    params = SamplingParams.of({"n": 8, "stop_token_ids": [3, 5]})
    assert params == SamplingParams(n=8, stop_token_ids=(3, 5))
    assert SamplingParams.of(params) is params
    assert SamplingParams.of(None) == SamplingParams()


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("stop_ids", "stop_token_ids"),
        ("stop", "stop_token_ids"),
    ],
)
def test_an_unknown_key_names_the_nearest_field(key: str, nearest: str) -> None:
    with pytest.raises(InvalidInputError, match=f"unknown sampling parameter '{key}'; did you mean '{nearest}'"):
        SamplingParams.of({key: 4})


def test_another_type_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"must be a mapping, None or rlcore's own SamplingParams, got builtins\.float"
    ):
        SamplingParams.of(0.7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field, value, accepted",
    [
        ("n", 0, "at least 1"),
        ("n", True, "an int"),
        ("n", 2.0, "an int"),
        ("temperature", -0.5, r"0 \(greedy\) or at least 0.01"),
        ("temperature", 1e-6, r"0 \(greedy\) or at least 0.01"),
        ("temperature", float("nan"), "a finite number"),
        ("temperature", "hot", "a finite number"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", 1.5, r"in \(0, 1\]"),
        ("top_k", -2, "at least 1, or -1 or 0 for all tokens"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", None, "an int"),
        ("stop_token_ids", (3, -1), "token ids, each at least 0"),
        ("stop_token_ids", 3, "token ids, each at least 0"),
        ("ignore_eos", 1, "True or False"),
        ("seed", 2**63, r"None or an int in \[-2\*\*63, 2\*\*63\)"),
    ],
)
def test_a_value_out_of_range_is_refused_by_field_value_and_range(field: str, value: Any, accepted: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"SamplingParams\.{field} must be {accepted}, got "):
        SamplingParams(**{field: value})


def test_several_greedy_samples_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="n must be 1 when temperature is 0, got 4"):
        SamplingParams(n=4, temperature=0.0)
