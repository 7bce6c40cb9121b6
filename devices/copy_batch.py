"""What a batch of copies must be: equal pairs that may run in any order, and at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlcore.errors import InvalidInputError


def check_copies(dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raises InvalidInputError for pairs that differ, are elsewhere, or whose memory overlaps."""
    if len(dst) != len(src):
        raise InvalidInputError(f"copy_batch takes a source for each destination, got {len(dst)} and {len(src)}")
    for position, (to, from_) in enumerate(zip(dst, src, strict=True)):
        if to.shape != from_.shape or to.dtype != from_.dtype:
            raise InvalidInputError(
                f"copy_batch takes pairs of equal shape and dtype, got {_describe(to)} from {_describe(from_)} "
                f"as pair {position}"
            )
    elsewhere = {tensor.device for tensor in (*dst, *src)} - {device, torch.device("cpu")}
    if {found.type for found in elsewhere} - {device.type}:
        raise InvalidInputError(
            f"copy_batch of {device} takes tensors there and in host memory, got {sorted(map(str, elsewhere))}"
        )
    for where in {tensor.device for tensor in dst}:
        _check_overlap(_ranges(dst, where), _ranges(src, where), where)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _ranges(tensors: Sequence[torch.Tensor], device: torch.device) -> np.ndarray:
    """[n, 2] first byte and end of the contiguous tensors there, in order. Strided ones may interleave: not checked."""
    found = [
        (tensor.data_ptr(), tensor.nbytes)
        for tensor in tensors
        if tensor.device == device and tensor.is_contiguous() and tensor.numel()
    ]
    ranges = np.array(found, dtype=np.uint64).reshape(-1, 2)
    ranges[:, 1] += ranges[:, 0]
    return ranges[ranges[:, 0].argsort()]


def _check_overlap(dst: np.ndarray, src: np.ndarray, device: torch.device) -> None:
    if (dst[1:, 0] < dst[:-1, 1]).any():
        raise InvalidInputError(f"copy_batch takes destinations that do not overlap; two on {device} do")
    if not len(dst):
        return
    first_behind = dst[:, 1].searchsorted(src[:, 0], side="right")
    is_inside = first_behind < len(dst)
    if (dst[first_behind[is_inside], 0] < src[is_inside, 1]).any():
        raise InvalidInputError(f"copy_batch takes sources that no destination overlaps; on {device} one does")
