# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""``gae`` and ``discounted_return`` in Triton: two reads and one write of the tokens, however long a sequence is.

With the pair (A, V) of the advantage and of the value of the next token that counts, a token is a linear map of the
pair after it,

    A_t = alpha A + beta V + x      V_t = kappa V + y

                  alpha      beta   x          kappa  y
    it counts     gamma lam  gamma  r_t - v_t  0      v_t
    it does not   1          0      0          1      0

and the last token of a sequence has alpha = beta = kappa = 0. A run of tokens is a map of the same form. One kernel
finds the role of each token and the map of each block of tokens; another composes the maps of the blocks behind its
own, as far as something still reaches it from there, and applies them. No block waits for another, and the order of
all sums is fixed.

A discounted return is an advantage with lam = 1 and values of 0.

Letters: T tokens, E entries of ``cu_seqlens``, J blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcore.kernels.operands import check_values, is_checked_on_device
from rlcore.kernels.returns import check_tokens

_TILE = {"BLOCK": 2048, "WAYS": 256, "num_warps": 4}


@triton.jit
def _composed(
    later_alpha, later_beta, later_x, later_kappa, later_y, alpha, beta, x, kappa, y,
):  # fmt: skip
    """The map of a token (or run) applied to that of the run behind it."""
    return (
        alpha * later_alpha,
        alpha * later_beta + beta * later_kappa,
        alpha * later_x + beta * later_y + x,
        kappa * later_kappa,
        kappa * later_y + y,
    )


@triton.jit
def _narrowed(edges, low, size, bound, WAYS: tl.constexpr):
    """Of the rising ``edges`` from ``low`` on: one part in WAYS that holds the first above ``bound``."""
    step = tl.cdiv(size, WAYS)
    i = tl.arange(0, WAYS) * step
    found = tl.load(edges + low + i, mask=i < size, other=0)
    count = tl.sum(((found <= bound) & (i < size)).to(tl.int32), 0)
    skipped = tl.where(count > 0, (count - 1) * step + 1, 0)
    return low + skipped, tl.where(count > 0, min(step - 1, size - skipped), 0)


@triton.jit
def _is_last(edges, E, t, first, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """Whether a sequence ends behind each token: bisection among the edges in this block."""
    low = 0
    high = 0
    low_size = E
    high_size = E
    while (low_size > 0) | (high_size > 0):
        low, low_size = _narrowed(edges, low, low_size, first, WAYS)
        high, high_size = _narrowed(edges, high, high_size, first + BLOCK, WAYS)
    at = tl.zeros([BLOCK], tl.int32) + low
    size = high - low
    while size > 0:
        half = tl.cdiv(size, 2)
        at += tl.where(tl.load(edges + at + half - 1) <= t, half, 0)
        size -= half
    return tl.load(edges + at, mask=at < high, other=0) == t + 1


@triton.jit
def _split(x):
    """Every fourth token, from the first to the fourth on."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0] // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _joined(x0, x1, x2, x3):
    """The inverse of ``_split``."""
    pairs = tl.join(tl.join(x0, x1), tl.join(x2, x3))
    return tl.reshape(tl.permute(pairs, [0, 2, 1]), [x0.shape[0] * 4])


@triton.jit
def _token_map(r, v, role, gamma, decay):
    is_counted = role % 2 == 1
    is_last = role > 1
    r = tl.where(is_counted, r, 0.0)
    v = tl.where(is_counted, v, 0.0)
    alpha = tl.where(is_last, 0.0, tl.where(is_counted, decay, 1.0))
    beta = tl.where(is_counted & (is_last == 0), gamma, 0.0)
    kappa = tl.where(is_counted | is_last, 0.0, 1.0)
    return alpha, beta, r - v, kappa, v


@triton.jit
def _behind_token(later, token):
    """``_composed`` of two tuples."""
    return _composed(later[0], later[1], later[2], later[3], later[4], token[0], token[1], token[2], token[3], token[4])


@triton.jit
def _maps(r, v, role, gamma, decay):
    """Of each of four neighbours the map of it and those of the four behind it; of each four and all behind it.

    Four are composed within a thread, since a scan across threads is ten times as slow.
    """
    r0, r1, r2, r3 = _split(r)
    v0, v1, v2, v3 = _split(v)
    role0, role1, role2, role3 = _split(role)
    map3 = _token_map(r3, v3, role3, gamma, decay)
    map2 = _behind_token(map3, _token_map(r2, v2, role2, gamma, decay))
    map1 = _behind_token(map2, _token_map(r1, v1, role1, gamma, decay))
    map0 = _behind_token(map1, _token_map(r0, v0, role0, gamma, decay))
    return map0, map1, map2, map3, tl.associative_scan(map0, 0, _composed, reverse=True)


@triton.jit
def _block_kernel(
    values, rewards, mask, edges, roles, blocks, is_valid_J, E, T, J, gamma, decay,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)
    first = j.to(tl.int64) * BLOCK
    t = first + tl.arange(0, BLOCK)
    is_counted = t < T
    if mask is not None:
        is_counted = tl.load(mask + t, mask=t < T, other=0) != 0
    r = tl.load(rewards + t, mask=t < T, other=0.0).to(tl.float32)
    v = tl.zeros([BLOCK], tl.float32)
    if values is not None:
        v = tl.load(values + t, mask=t < T, other=0.0).to(tl.float32)
    is_last = _is_last(edges, E, t, first, BLOCK, WAYS)
    role = is_counted.to(tl.int8) + is_last.to(tl.int8) * 2
    tl.store(roles + t, role, mask=t < T)
    _, _, _, _, maps = _maps(r, v, role, gamma, decay)
    four = tl.arange(0, BLOCK // 4)
    for field in tl.static_range(5):
        tl.store(blocks + field * J + j + four, maps[field], mask=four == 0)
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
def _behind(blocks, J, WAYS: tl.constexpr):
    """(A, V) behind this block."""
    alpha, beta, x, kappa, y = 1.0, 0.0, 0.0, 1.0, 0.0
    start = tl.program_id(0) + 1
    while (start < J) & ((alpha != 0.0) | (beta != 0.0) | (kappa != 0.0)):
        j = start + tl.arange(0, WAYS)
        is_block = j < J
        later_alpha = tl.load(blocks + j, mask=is_block, other=1.0)
        later_beta = tl.load(blocks + J + j, mask=is_block, other=0.0)
        later_x = tl.load(blocks + 2 * J + j, mask=is_block, other=0.0)
        later_kappa = tl.load(blocks + 3 * J + j, mask=is_block, other=1.0)
        later_y = tl.load(blocks + 4 * J + j, mask=is_block, other=0.0)
        later = later_alpha, later_beta, later_x, later_kappa, later_y
        maps = tl.associative_scan(later, 0, _composed, reverse=True)
        is_first = tl.arange(0, WAYS) == 0
        alpha, beta, x, kappa, y = _composed(
            tl.sum(tl.where(is_first, maps[0], 0.0), 0),
            tl.sum(tl.where(is_first, maps[1], 0.0), 0),
            tl.sum(tl.where(is_first, maps[2], 0.0), 0),
            tl.sum(tl.where(is_first, maps[3], 0.0), 0),
            tl.sum(tl.where(is_first, maps[4], 0.0), 0),
            alpha, beta, x, kappa, y,
        )  # fmt: skip
        start += WAYS
    return x, y


@triton.jit
def _applied(map, a, v):
    return map[0] * a + map[1] * v + map[2], map[3] * v + map[4]


@triton.jit
def _token_kernel(
    values, rewards, roles, blocks, is_valid_J, advantages, returns, is_valid, T, J, gamma, decay,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    role = tl.load(roles + t, mask=t < T, other=2)
    r = tl.load(rewards + t, mask=t < T, other=0.0).to(tl.float32)
    v = tl.zeros([BLOCK], tl.float32)
    if values is not None:
        v = tl.load(values + t, mask=t < T, other=0.0).to(tl.float32)
    map0, map1, map2, map3, maps = _maps(r, v, role, gamma, decay)
    a_block, v_block = _behind(blocks, J, WAYS)
    four = tl.arange(0, BLOCK // 4)
    behind = tl.minimum(four + 1, BLOCK // 4 - 1)
    is_end = four == BLOCK // 4 - 1
    a = tl.where(is_end, a_block, tl.gather(maps[0] * a_block + maps[1] * v_block + maps[2], behind, 0))
    v = tl.where(is_end, v_block, tl.gather(maps[3] * v_block + maps[4], behind, 0))
    a0, v0 = _applied(map0, a, v)
    a1, v1 = _applied(map1, a, v)
    a2, v2 = _applied(map2, a, v)
    a3, v3 = _applied(map3, a, v)
    advantage = _joined(a0, a1, a2, a3)
    if returns is None:
        tl.store(advantages + t, tl.where(role % 2 == 1, advantage, 0.0), mask=t < T)
    else:
        tl.store(advantages + t, advantage, mask=t < T)
        tl.store(returns + t, _joined(a0 + v0, a1 + v1, a2 + v2, a3 + v3), mask=t < T)
    if tl.program_id(0) == 0:
        num_wrong = 0
        for start in range(0, J, WAYS):
            j = start + tl.arange(0, WAYS)
            num_wrong += tl.sum((tl.load(is_valid_J + j, mask=j < J, other=1) == 0).to(tl.int32), 0)
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
    blocks_5J = advantages_T.new_empty(5, num_blocks)
    flags = advantages_T.new_empty(num_blocks + 1, dtype=torch.bool)
    is_valid_J, is_valid = flags[1:], flags[0]
    roles_T = advantages_T.new_empty(num_tokens, dtype=torch.int8)
    sizes = num_tokens, num_blocks, gamma, decay
    _block_kernel[(num_blocks,)](
        values_T, rewards_T, mask_T, cu_seqlens, roles_T, blocks_5J, is_valid_J, len(cu_seqlens), *sizes, **_TILE
    )
    _token_kernel[(num_blocks,)](
        values_T, rewards_T, roles_T, blocks_5J, is_valid_J, advantages_T, returns_T, is_valid, *sizes, **_TILE
    )
    check_values(is_valid, lambda: f"{op}: its inputs must be finite, and cu_seqlens rise from 0 to the tokens")
    return advantages_T
