"""The bytes of tensors of all strides, dtypes and lazy forms."""

from __future__ import annotations

import pytest
import torch

from rlcore.tensor_data import flat_bytes, host_bytes


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_column_gives_its_bytes(rows: int, dtype: torch.dtype) -> None:
    matrix = torch.arange(rows * 5).view(rows, 5).to(dtype)
    column = matrix[:, 0]
    assert bytes(host_bytes(flat_bytes(column))) == bytes(
        host_bytes(column.clone(memory_format=torch.contiguous_format))
    )


def test_the_bytes_share_the_memory_of_a_contiguous_tensor() -> None:
    one = torch.zeros(1, 5)[:, 0]
    flat_bytes(one).fill_(255)
    assert one.isnan().all()


def test_conjugates_and_negatives_give_the_values_that_they_show() -> None:
    lazy = torch.tensor([1 + 2j]).conj()
    assert flat_bytes(lazy).view(torch.complex64).tolist() == [1 - 2j]
    assert flat_bytes(lazy.imag).view(torch.float32).tolist() == [-2.0]
