"""The tokens that may be sampled under top-k and top-p: one definition for the sampler and for the trainer.

As in vLLM: logits are divided by the temperature; top-k keeps the columns not below the k-th largest logit
(ties stay); of the softmax renormalised over them, top-p keeps the smallest set of most probable tokens whose
mass reaches top_p (Holtzman et al. 2020, arXiv 1904.09751), at least one. Among equals the later column wins,
always.

Letters: T rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.arguments import NUMBER, WHOLE
from rlcore.errors import InvalidInputError
from rlcore.kernels.chunks import row_chunks, rows_per_chunk
from rlcore.kernels.operands import check_float, check_positive, check_same_device, check_shape, check_values
from rlcore.kernels.softmax_rows import column, wide_dtype


def keep_mask(
    logits_TV: Tensor, *, temperature: float | Tensor, top_p: float | Tensor = 1.0, top_k: int | Tensor = -1
) -> Tensor:
    """Return True for tokens that may be sampled.

    Args:
        logits_TV: [T, V] float.
        temperature: > 0, a float or [T].
        top_p: in (0, 1], a float or [T]; 1 keeps all.
        top_k: > 0, an int or [T] integers; values <= 0 or >= V keep all.

    Returns:
        [T, V] bool, at least one True in each row.

    Raises:
        InvalidInputError: a shape, dtype, device or value outside the above.
    """
    _check(logits_TV, temperature, top_p, top_k)
    num_rows, vocab_size = logits_TV.shape
    keep_TV = torch.ones_like(logits_TV, dtype=torch.bool)
    if not any(isinstance(value, Tensor) for value in (top_p, top_k)) and top_p == 1 and not 0 < top_k < vocab_size:
        return keep_TV
    # Sorting takes 8 more bytes an element for the columns.
    rows = rows_per_chunk(num_rows, vocab_size, 8, None)
    for chunk in row_chunks(num_rows, rows):
        temperature_T, top_p_T, top_k_T = (
            value[chunk] if isinstance(value, Tensor) else value for value in (temperature, top_p, top_k)
        )
        wide_TV = logits_TV[chunk].detach().to(wide_dtype(logits_TV.dtype))
        keep_TV[chunk] = _keep(wide_TV / column(temperature_T), column(top_p_T), column(top_k_T))
    return keep_TV


def _keep(scaled_TV: Tensor, top_p: float | Tensor, top_k: float | Tensor) -> Tensor:
    vocab_size = scaled_TV.shape[1]
    ascending_TV, column_TV = scaled_TV.sort(dim=1, stable=True)
    k_T1 = _each_row(top_k, scaled_TV).long()
    k_T1 = torch.where(k_T1 > 0, k_T1.clamp(max=vocab_size), vocab_size)
    is_dropped_TV = ascending_TV < ascending_TV.gather(1, vocab_size - k_T1)
    mass_TV = ascending_TV.masked_fill(is_dropped_TV, -torch.inf).softmax(1).cumsum(1)
    p_T1 = _each_row(top_p, scaled_TV).to(scaled_TV.dtype)
    is_dropped_TV |= (mass_TV <= 1 - p_T1) & (p_T1 < 1)
    is_dropped_TV[:, -1] = False
    return torch.empty_like(is_dropped_TV).scatter_(1, column_TV, ~is_dropped_TV)


def _each_row(value: float | Tensor, scaled_TV: Tensor) -> Tensor:
    """Return [T, 1]. The device itself writes a number; a copy from the host would wait for it."""
    return value if isinstance(value, Tensor) else scaled_TV.new_full((len(scaled_TV), 1), value)


def _check(logits_TV: Tensor, temperature: float | Tensor, top_p: float | Tensor, top_k: int | Tensor) -> None:
    check_float("logits", logits_TV)
    if logits_TV.dim() != 2 or logits_TV.shape[1] == 0:
        raise InvalidInputError(f"logits must be [T, V] with V > 0; got {list(logits_TV.shape)}")
    for name, value in {"temperature": temperature, "top_p": top_p, "top_k": top_k}.items():
        if isinstance(value, Tensor):
            check_shape(name, value, (len(logits_TV),), "a number, or one for each row")
            check_same_device("logits", logits_TV.device, **{name: value})
    for name, value, kind in (("top_p", top_p, NUMBER), ("top_k", top_k, WHOLE)):
        if not (isinstance(value, Tensor) or kind.has(value)):
            raise InvalidInputError(f"{name} must be {kind.words}, or a tensor of one for each row; got {value!r}")
    if isinstance(temperature, Tensor):
        check_values((temperature > 0) & temperature.isfinite(), lambda: f"temperature must be > 0; got {temperature}")
    else:
        check_positive("temperature", temperature)
    is_valid = (top_p > 0) & (top_p <= 1) if isinstance(top_p, Tensor) else torch.tensor(0 < top_p <= 1)
    check_values(is_valid, lambda: f"top_p must be in (0, 1]; got {top_p}")
