"""Plain values come back from JSON as they were, or are refused by where they stand."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rlcore.engines.checkpoints.plain_values import plain_copy, tagged, untagged
from rlcore.errors import InvalidInputError


class Colour(enum.IntEnum):
    RED = 3


class Name(str, enum.Enum):  # noqa: UP042 - another way than StrEnum's to be text
    FIRST = "first"


def through_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


@pytest.mark.parametrize(
    "value",
    [
        {"step": 3, "seen": [1, 2, [], {}], "name": "\u00e9\n\u2028\x00", "none": None, "flags": [True, False]},
        {"float": [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1e22], "whole": [2**63, -(2**64), 10**30]},
        {"numpy": np.float64(0.1), "enum": Colour.RED, "text": Name.FIRST, "ordered": OrderedDict(b=1, a=2)},
        {"!tuple": [1], Name.FIRST: 2},
    ],
)
def test_what_is_accepted_comes_back_equal(value: dict[str, Any]) -> None:
    found = through_json(plain_copy(value, "extra"))
    assert found == value
    assert math.copysign(1, found.get("float", [0, -1])[1]) == -1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"a": [1, {"b": math.nan}]},
            r"extra\['a'\]\[1\]\['b'\] = nan, .*; leave it out, or give it as text: str",
        ),
        (
            {"best": -math.inf},
            r"extra\['best'\] = -inf, which would not come back equal\. Accepted are None, True",
        ),
        ({"t": (1, 2)}, r"extra\['t'\] = \(1, 2\), .*; give list\(value\)"),
        (
            {"m": {3: "x"}},
            r"extra\['m'\] = \{3: 'x'\}, .*; give \{str\(key\): item for key, item in value\.",
        ),
        ({1: 2}, r"extra = \{1: 2\}, .*, the dicts with keys of str; give \{str\(key\)"),
        ({"raw": b"ab"}, r"extra\['raw'\] = b'ab', .*; give value\.hex\(\)"),
        ({"raw": bytearray(b"ab")}, r"extra\['raw'\] = bytearray"),
        ({"s": {1}}, r"extra\['s'\] = \{1\}, .*; give sorted\(value\)"),
        ({"p": Path("x")}, r"extra\['p'\] = .*; give str\(value\)"),
        ({"n": torch.ones(2)}, r"extra\['n'\] = tensor.*; give value\.tolist\(\)"),
        ({"n": np.int64(3)}, r"extra\['n'\] = .*; give value\.tolist\(\)"),
        ({"c": 1j}, r"extra\['c'\] = 1j, .*; give float\(value\) or int\(value\)"),
        ({"u": "\ud800"}, r"extra\['u'\] = '\\ud800', .*; give text that UTF-8 can hold"),
        ({"\ud800": 1}, r"a key of extra = '\\ud800'"),
        ({"o": object()}, r"extra\['o'\] = <object object.*; give what it is made of, or leave it out"),
        ({"long": tuple(range(1000))}, r"extra\['long'\] = \(0, 1, .{60,80}\.\.\. of tuple, which"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"save\(\) cannot keep {message}"):
        plain_copy(value, "extra")


def test_values_that_hold_themselves_are_refused() -> None:
    value: dict[str, Any] = {}
    value["again"] = [value]
    with pytest.raises(InvalidInputError, match=r"cannot keep extra\['again'\].*more than 100 lists and dicts"):
        plain_copy(value, "extra")


@pytest.mark.parametrize(
    "value",
    [
        {"milestones": Counter({30: 1, 80: 2}), "best": math.inf, "betas": (0.9, 0.999), "eps": (None, -math.inf)},
        {"nested": [((1, (2,)), {(1, 2): {3: ()}})], "tags": {"!tuple": [1], "!dict": {"!float": 1.0}}, "empty": {}},
    ],
)
def test_states_of_optimizers_and_schedulers_come_back_of_their_types(value: dict[str, Any]) -> None:
    found = untagged(through_json(tagged(value, "schedulers")))
    assert repr(found) == repr(value)


def test_not_a_number_comes_back_as_one() -> None:
    assert math.isnan(untagged(through_json(tagged({"best": math.nan}, "schedulers")))["best"])


def test_a_state_that_is_no_plain_value_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidInputError, match=r"cannot keep schedulers\['warm'\]\['scale'\] = <function"):
        tagged({"warm": {"scale": lambda x: x}}, "schedulers")
