# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""``gae`` and ``discounted_return`` in Triton: two reads and one write of the tokens, however long a sequence is.

A token that counts passes on C = gamma (V + lam A), and takes only the same from the next one, n:

    A_t = r_t - V_t + C_n      C_t = c C_n + x,   c = gamma lam,   x = gamma V_t + gamma lam (r_t - V_t)

A token that does not count has c = 1 and x = 0, and the last one of a sequence c = 0. A run of tokens is a map (c, x)
of the same form. One kernel finds the role of each token and the map of each block of tokens; another composes the
maps of the blocks behind its own, as far as their values still have influence, and applies them. Within a block
16 tokens are composed by a thread, and the threads' maps by a scan. No block waits for another, and the order of all
sums is fixed.

A discounted return is an advantage with lam = 1 and values of 0.

Letters: T tokens, E entries of ``cu_seqlens``, J blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcore.kernels.operands import check_values, is_checked_on_device
from rlcore.kernels.returns.scan import check_tokens

_TILE = {"BLOCK": 2048, "WAYS": 256, "num_warps": 4}
_RUN = tl.constexpr(16)
"""Tokens of a thread in such a block: two calls of ``_split``."""


@triton.jit
def _composed(later_c, later_x, c, x):
    """Compose the map of a token (or run) with that of the run behind it."""
    return c * later_c, c * later_x + x


@triton.jit
def _narrowed(edges, low, size, bound, WAYS: tl.constexpr):
    """Return the one part in WAYS, of the rising ``edges`` from ``low`` on, that holds the first above ``bound``."""
    step = tl.cdiv(size, WAYS)
    i = tl.arange(0, WAYS) * step
    found = tl.load(edges + low + i, mask=i < size, other=0)
    count = tl.sum(((found <= bound) & (i < size)).to(tl.int32), 0)
    skipped = tl.where(count > 0, (count - 1) * step + 1, 0)
    return low + skipped, tl.where(count > 0, min(step - 1, size - skipped), 0)


@triton.jit
def _repeated(x, COUNT: tl.constexpr):
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], COUNT]), [x.shape[0] * COUNT])


@triton.jit
def _first_above(edges, low, size, bound):
    """Return for each bound the place of the first edge above it, among ``size`` edges from ``low`` on."""
    at = tl.zeros(bound.shape, tl.int32) + low
    while size > 0:
        half = tl.cdiv(size, 2)
        at += tl.where(tl.load(edges + at + half - 1) <= bound, half, 0)
        size -= half
    return at


@triton.jit
def _is_last(edges, E, first, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """Return 1 where a sequence ends behind a token of this block; each run finds its edges by bisections.

    A loop over edges would be slow: empty sequences share an edge, and thousands of them would take milliseconds.
    """
    low = 0
    high = 0
    low_size = E
    high_size = E
    while (low_size > 0) | (high_size > 0):
        low, low_size = _narrowed(edges, low, low_size, first, WAYS)
        high, high_size = _narrowed(edges, high, high_size, first + BLOCK, WAYS)
    begin = tl.arange(0, BLOCK // _RUN) * _RUN
    bound = first + begin
    is_behind = tl.zeros([BLOCK // _RUN], tl.int32)  # a bit for each token of the run
    num_left = high - low
    while num_left > 0:
        at = _first_above(edges, low, high - low, bound)
        edge = tl.load(edges + at, mask=at < high, other=0).to(tl.int64)
        place = tl.minimum(edge - first, 2 * BLOCK).to(tl.int32) - begin - 1
        is_inside = (edge > bound) & (place < _RUN)  # so that it ends, whatever the edges are
        is_behind |= tl.where(is_inside, 1 << place, 0)
        num_left = tl.sum(is_inside.to(tl.int32), 0)
        bound = tl.maximum(bound, edge)
    return _repeated(is_behind, _RUN) >> (tl.arange(0, BLOCK) % _RUN) & 1


@triton.jit
def _split(x):
    """Return every fourth entry from the first on, from the second on, and so on."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0] // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _joined(x0, x1, x2, x3):
    """Undo ``_split``."""
    pairs = tl.join(tl.join(x0, x1), tl.join(x2, x3))
    return tl.reshape(tl.permute(pairs, [0, 2, 1]), [x0.shape[0] * 4])


@triton.jit
def _fours(c, x):
    """Return the maps of four neighbours each."""
    c0, c1, c2, c3 = _split(c)
    x0, x1, x2, x3 = _split(x)
    return c0 * c1 * (c2 * c3), x0 + c0 * (x1 + c1 * (x2 + c2 * x3))


@triton.jit
def _within_fours(c, x, behind):
    """Return the value behind each entry, from the value behind each four."""
    _, c1, c2, c3 = _split(c)
    _, x1, x2, x3 = _split(x)
    behind2 = x3 + c3 * behind
    behind1 = x2 + c2 * behind2
    return _joined(x1 + c1 * behind1, behind1, behind2, behind)


@triton.jit
def _token_maps(r, v, role, gamma, decay):
    is_counted = (role & 1) != 0
    c = tl.where(role > 1, 0.0, tl.where(is_counted, decay, 1.0))
    return c, tl.where(is_counted, gamma * v + decay * (r - v), 0.0)


@triton.jit
def _block_kernel(
    values, rewards, mask, edges, roles, blocks, is_valid_J, E, T, J, gamma, decay,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)
    first = j.to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    is_token = i < tl.minimum(T - first, BLOCK).to(tl.int32)
    is_counted = is_token
    if mask is not None:
        is_counted = tl.load(mask + first + i, mask=is_token, other=0) != 0
    r = tl.load(rewards + first + i, mask=is_token, other=0.0).to(tl.float32)
    v = tl.zeros([BLOCK], tl.float32)
    if values is not None:
        v = tl.load(values + first + i, mask=is_token, other=0.0).to(tl.float32)
    is_last = _is_last(edges, E, first, BLOCK, WAYS)
    role = is_counted.to(tl.int8) + is_last.to(tl.int8) * 2
    tl.store(roles + first + i, role, mask=is_token)
    c, x = _token_maps(r, v, role, gamma, decay)
    c, x = _fours(c, x)
    c, x = tl.associative_scan(_fours(c, x), 0, _composed, reverse=True)
    run = tl.arange(0, BLOCK // _RUN)
    tl.store(blocks + j + run, c, mask=run == 0)
    tl.store(blocks + J + j + run, x, mask=run == 0)
    is_wrong = is_counted & ((tl.abs(r) < float("inf")) & (tl.abs(v) < float("inf")) == 0)
    num_wrong = tl.sum(is_wrong.to(tl.int32), 0)
    for start in range(j * WAYS, E, J * WAYS):  # the programs share the edges
        e = start + tl.arange(0, WAYS)
        edge = tl.load(edges + e, mask=e < E, other=0)
        before = tl.load(edges + e - 1, mask=(e > 0) & (e < E), other=0)
        is_off = (edge < before) | ((e == 0) & (edge != 0)) | ((e == E - 1) & (edge != T))
        num_wrong += tl.sum((is_off & (e < E)).to(tl.int32), 0)
    tl.store(is_valid_J + j, num_wrong == 0)


@triton.jit
def _behind(blocks, j, J, WAYS: tl.constexpr):
    """Return C behind block j."""
    c = tl.load(blocks + j + 1, mask=j + 1 < J, other=0.0)
    x = tl.load(blocks + J + j + 1, mask=j + 1 < J, other=0.0)
    start = j + 2
    while (start < J) & (c != 0.0):
        j_W = start + tl.arange(0, WAYS)
        later_c = tl.load(blocks + j_W, mask=j_W < J, other=1.0)
        later_x = tl.load(blocks + J + j_W, mask=j_W < J, other=0.0)
        later_c, later_x = tl.associative_scan((later_c, later_x), 0, _composed, reverse=True)
        is_first = tl.arange(0, WAYS) == 0
        x += c * tl.sum(tl.where(is_first, later_x, 0.0), 0)
        c *= tl.sum(tl.where(is_first, later_c, 0.0), 0)
        start += WAYS
    return x


@triton.jit
def _token_kernel(
    values, rewards, roles, blocks, is_valid_J, advantages, returns, is_valid, T, J, gamma, decay,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    j = J - 1 - tl.program_id(0)  # backwards: the last reads of the other kernel are still in the cache
    first = j.to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    is_token = i < tl.minimum(T - first, BLOCK).to(tl.int32)
    role = tl.load(roles + first + i, mask=is_token, other=2)
    r = tl.load(rewards + first + i, mask=is_token, other=0.0).to(tl.float32)
    v = tl.zeros([BLOCK], tl.float32)
    if values is not None:
        v = tl.load(values + first + i, mask=is_token, other=0.0).to(tl.float32)
    c, x = _token_maps(r, v, role, gamma, decay)
    c_four, x_four = _fours(c, x)
    c_run, x_run = tl.associative_scan(_fours(c_four, x_four), 0, _composed, reverse=True)
    behind_block = _behind(blocks, j, J, WAYS)
    run = tl.arange(0, BLOCK // _RUN)
    behind = tl.gather(c_run * behind_block + x_run, tl.minimum(run + 1, BLOCK // _RUN - 1), 0)
    behind = tl.where(run == BLOCK // _RUN - 1, behind_block, behind)
    behind = _within_fours(c_four, x_four, behind)
    behind = _within_fours(c, x, behind)
    is_counted = (role & 1) != 0
    a = tl.where(is_counted, r - v + tl.where(role > 1, 0.0, behind), 0.0)
    tl.store(advantages + first + i, a, mask=is_token)
    if returns is not None:
        tl.store(returns + first + i, tl.where(is_counted, a + v, 0.0), mask=is_token)
    if tl.program_id(0) == 0:
        num_wrong = 0
        for start in range(0, J, WAYS):
            block = start + tl.arange(0, WAYS)
            num_wrong += tl.sum((tl.load(is_valid_J + block, mask=block < J, other=1) == 0).to(tl.int32), 0)
        tl.store(is_valid, num_wrong == 0)


def gae_triton(
    values_T: Tensor, rewards_T: Tensor, mask_T: Tensor | None, cu_seqlens: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Two launches, and one for the check."""
    returns_T = torch.empty_like(rewards_T, dtype=torch.float32)
    return _advantages("gae", values_T, rewards_T, mask_T, cu_seqlens, returns_T, gamma, gamma * lam), returns_T


def discounted_return_triton(rewards_T: Tensor, mask_T: Tensor | None, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """Two launches, and one for the check."""
    return _advantages("discounted_return", None, rewards_T, mask_T, cu_seqlens, None, gamma, gamma)


def _advantages(
    op: str,
    values_T: Tensor | None,
    rewards_T: Tensor,
    mask_T: Tensor | None,
    cu_seqlens: Tensor,
    returns_T: Tensor | None,
    gamma: float,
    decay: float,
) -> Tensor:
    if not is_checked_on_device(rewards_T):
        named = {"rewards": rewards_T} if values_T is None else {"values": values_T, "rewards": rewards_T}
        check_tokens(op, mask_T, cu_seqlens, named)
    num_tokens = len(rewards_T)
    num_blocks = max(triton.cdiv(num_tokens, _TILE["BLOCK"]), 1)
    advantages_T = torch.empty_like(rewards_T, dtype=torch.float32)
    blocks_2J = advantages_T.new_empty(2, num_blocks)
    flags = advantages_T.new_empty(num_blocks + 1, dtype=torch.bool)
    is_valid_J, is_valid = flags[1:], flags[0]
    roles_T = advantages_T.new_empty(num_tokens, dtype=torch.int8)
    numbers = num_tokens, num_blocks, gamma, decay
    _block_kernel[(num_blocks,)](
        values_T, rewards_T, mask_T, cu_seqlens, roles_T, blocks_2J, is_valid_J, len(cu_seqlens), *numbers, **_TILE
    )
    _token_kernel[(num_blocks,)](
        values_T, rewards_T, roles_T, blocks_2J, is_valid_J, advantages_T, returns_T, is_valid, *numbers, **_TILE
    )
    check_values(is_valid, lambda: f"{op}: its inputs must be finite, and cu_seqlens rise from 0 to the tokens")
    return advantages_T
