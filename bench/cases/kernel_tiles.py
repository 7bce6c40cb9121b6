"""Tiles of the product whose logits are merged into statistics, by hidden size: what their choice is held against.

Letters: T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from rlcore.bench.case import Case, Contender, Work
from rlcore.bench.cases.kernel_inputs import CHECKED_ROWS, HeadSize, Inputs, assert_scores
from rlcore.device import Device
from rlcore.errors import UnsupportedError
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.linear.tile_cost import TALL, WIDE, TileShape
from rlcore.kernels.softmax_rows import ScaledRows

_T, _V = 8192, 32_000
_HIDDEN = (512, 896, 1024, 1536, 2048, 4096)
_SHAPES = {"wide": WIDE, "tall": TALL}
_NO_TOKEN = -100


def _prepare(device: Device) -> Work:
    query = Query(device.type, torch.bfloat16, _HIDDEN[0], _V, frozenset({"entropy"}))
    if choose("linear_logprob", query).implementation != "tiled":
        raise UnsupportedError(f"tiles on {device.name}", "rlcore ops explain linear_logprob says why")
    inputs = [Inputs.on(device, HeadSize(_T, _V, H, torch.bfloat16)) for H in _HIDDEN]
    contenders = [_contender(one, name, shape) for one in inputs for name, shape in _SHAPES.items()]
    return Work(tuple(contenders), {}, runs_on="stream")


def _contender(inputs: Inputs, name: str, shape: TileShape) -> Contender:
    from rlcore.kernels.linear.triton_tiles import TileStatistics, tile_statistics  # Triton is an extra

    size, few = inputs.size, slice(0, CHECKED_ROWS)
    rows = ScaledRows(inputs.target_T, _NO_TOKEN, 1.0).with_factors()
    true = Inputs(size, inputs.hidden_TH[few], inputs.weight_VH, inputs.target_T[few]).true_scores()

    def run() -> TileStatistics:
        return tile_statistics(inputs.hidden_TH, inputs.weight_VH, None, rows, with_entropy=True, shape=shape)

    def check(found: TileStatistics) -> None:
        assert_scores((found.logprob, found.entropy), true, size.dtype)

    limits = {"product/bfloat16": 2 * size.T * size.H * size.V}
    return Contender(name, run, check, params=inputs.params, limits=limits)


cases = (
    Case(
        "kernels/tile_shapes",
        "the product with statistics by the shape of its tiles and the hidden size",
        _prepare,
        device_estimate_s=25.0,
    ),
)
