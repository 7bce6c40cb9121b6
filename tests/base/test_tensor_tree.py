"""Trees of plain values and tensors: they come back as they were, and nothing is pickled."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.tensor_tree import FIRST_FREE_CODE, INLINE_BYTES, Extension, TreeEncoder, decode_tree


class WithSets(TreeEncoder):
    def other(self, value: Any) -> Any:
        if isinstance(value, set):
            return Extension(FIRST_FREE_CODE, [self.tagged(item) for item in value])
        return super().other(value)


def sent(tree: Any) -> Any:
    encoder = WithSets()
    data = encoder.encode(tree)
    return decode_tree(data, encoder.tensors, {FIRST_FREE_CODE: set})


@pytest.mark.parametrize(
    "tree",
    [
        None, True, -3, 2.5, float("inf"), "text", b"\0", [], [1, [2]], (), (1, (2, [3])), {}, {"a": (1,), 2: [None]},
        {(1, 2), "x"}, [{"a": {3}}],
    ],
)  # fmt: skip
def test_a_tree_comes_back_as_it_was(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dumps", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    found = sent(tree)
    assert found == tree and type(found) is type(tree)


@pytest.mark.parametrize("nbytes", [0, 3, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1])
def test_large_tensors_are_left_out(nbytes: int) -> None:
    tensor = torch.arange(nbytes).to(torch.uint8)
    encoder = TreeEncoder()
    data = encoder.encode({"a": [tensor, 1]})
    assert len(encoder.tensors) == (nbytes >= INLINE_BYTES)
    assert len(data) < INLINE_BYTES + 100
    assert torch.equal(decode_tree(data, encoder.tensors)["a"][0], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(), torch.randn(4).to(torch.bfloat16), torch.tensor(True),
        torch.randn(2, dtype=torch.cfloat).conj(), torch.nn.Parameter(torch.ones(2)), torch.empty(0, 3),
    ],
    ids=["transposed", "bfloat16", "scalar", "conjugate", "parameter", "empty"],
)  # fmt: skip
def test_a_small_tensor_comes_back_equal_and_can_be_resized(tensor: torch.Tensor) -> None:
    found = sent((tensor,))[0]
    assert found.dtype == tensor.dtype and torch.equal(found, tensor.detach())
    assert not found.requires_grad
    found.untyped_storage().resize_(0)


def test_a_number_of_numpy_comes_back_as_pythons() -> None:
    assert sent([np.float64(1.5), np.int32(2)]) == [1.5, 2]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "object"),
        ({(1,): 2}, "dict"),
        (np.zeros(2), "ndarray"),
        (torch.empty(1, device="meta"), "Tensor of layout torch.strided on meta"),
        (torch.ones(2).to_sparse(), "Tensor of layout torch.sparse_coo on cpu"),
    ],
)
def test_a_value_that_is_no_tree_is_named(value: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        sent([value])
