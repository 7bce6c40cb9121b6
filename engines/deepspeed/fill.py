"""Whole weights written into the parts that a rank holds."""

from __future__ import annotations

from torch import Tensor

from rlcore.engines.fsdp2.pieces import own_pieces, read_piece
from rlcore.weights.shards import local_part, own_box
from rlcore.weights.view import WeightPart


def fill(part: WeightPart, weight: Tensor) -> None:
    """Copy this rank's elements of a whole weight into the parameter of which ``part`` is a view."""
    parameter, view = part.parameter.detach(), part.view
    is_all = view.is_contiguous() and view.numel() == parameter.numel() == weight.numel()
    if parameter.dim() == 1 and is_all:  # a flat one: row by row it would be a piece for each row
        (own,) = own_box(parameter)
        local_part(parameter).copy_(weight.reshape(-1)[own])
        return
    for box, tensor in own_pieces(view, parameter):
        tensor.copy_(read_piece(weight.__getitem__, part, box))
