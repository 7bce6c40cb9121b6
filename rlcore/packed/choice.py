"""The choice of an implementation of packed attention, with the reasons against the others.

An implementation is refused by its declared limits, or by a probe: forward and backward over a few short sequences on
the device, compared with plain torch. So the abilities of a device, a torch or a package are tried, not assumed.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import varlen
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

from rlcore import probing
from rlcore._torch_private import check_can_run_triton, takes_cudnn
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.packed.attention_call import AttentionCall
from rlcore.packed.flash_4 import attend_flash_4
from rlcore.packed.implementations import (
    PackedSequences,
    attend_flash,
    attend_flex,
    attend_long,
    attend_per_sequence,
    attend_varlen,
    prepare_flex,
)
from rlcore.planned import PlannedDevice, apart_from_step, planned_device
from rlcore.registry import registry, resolve

logger = logging.getLogger(__name__)

OPERATOR = "packed_attention"
_PROBE_LENGTHS = (1, 37, 5, 150)  # one token, odd lengths, and more than one block of 128
_LONG_PROBE_LENGTHS = ((37, 150, 150, 5), (150,))
"""Packs for ``long_sequences``: one with a batch of equal lengths, and a lone sequence, which has a path of its own."""
_PROBE_WINDOW = 16
_FLASH_ARCH, _FLASH_HEAD = 80, 256
"""The first architecture and the largest head of torch's own kernels of flash attention."""
_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 5e-3, torch.float64: 1e-9}
"""Largest relative error of a probe. A wrong mask is off by 0.1 and more; TF32 products by 1e-3."""


LONG = "long_sequences"
_LONG_WORK = 1e13
"""Multiplications and additions of a run, in the forward of all layers. cuDNN saves 0.043 to 0.053 s of their forward
and backward beside FlashAttention 2 (H100), and plans for each new shape: 0.14 to 0.15 s, and once more for a
recomputation, for which autograd has a thread of its own. Three or four packs of a length make up for it."""


Reasons = dict[tuple[str, AttentionCall, torch.device, torch.dtype], str | None]
"""Answers of ``why_not`` by its arguments."""


class AttentionChoice(NamedTuple):
    """The implementation that runs, and the reason against each better one."""

    implementation: str
    """One of ``IMPLEMENTATIONS``, or "padded"."""
    refused: tuple[tuple[str, str], ...]
    """(implementation, reason)."""

    def __str__(self) -> str:
        return "\n".join([f"{self.implementation} runs", *(f"not {name}: {reason}" for name, reason in self.refused)])


# ----------------------------------------------------------------------------------------------- what each lacks


def _flash_lacks(version: int, *features: str) -> Callable[[AttentionCall, torch.device], str | None]:
    """Return what a version of flash-attn lacks; ``features`` are those that it has not."""

    def lacks(call: AttentionCall, device: torch.device) -> str | None:
        if not _INSTALLED[version]():
            return f"the package {_PACKAGES[version]} is not installed for this device"
        return _lacks(call, *features)

    return lacks


_INSTALLED = {2: is_flash_attn_2_available, 3: is_flash_attn_3_available, 4: is_flash_attn_4_available}
_PACKAGES = {2: "flash-attn", 3: "flash-attn 3", 4: "flash-attn-4"}


def _varlen_lacks(call: AttentionCall, device: torch.device) -> str | None:
    lacks_window = "window_size" not in inspect.signature(varlen.varlen_attn).parameters
    of_torch = f"that of torch {torch.__version__} has no sliding windows" if lacks_window else None
    return _lacks(call, "softcap", "has_sinks", "has_dropout") or of_torch


def _flex_lacks(call: AttentionCall, device: torch.device) -> str | None:
    try:
        check_can_run_triton(device)
    except (ImportError, NotImplementedError, RuntimeError) as error:
        return f"it is slow unless compiled with triton: {probing.short_line(error)}"
    return _lacks(call, "has_dropout")


def _long_lacks(call: AttentionCall, device: torch.device) -> str | None:
    return _lacks(call, "window", "softcap", "has_sinks", "has_dropout")


def _nothing_lacks(call: AttentionCall, device: torch.device) -> str | None:
    return None


def _lacks(call: AttentionCall, *features: str) -> str | None:
    asked = [name.removeprefix("has_") for name in features if getattr(call, name)]
    return f"it has no {' and no '.join(asked)}" if asked else None


def _prepare_nothing(packed: PackedSequences, windows: Iterable[int | None]) -> None:
    pass


class Implementation(NamedTuple):
    attend: Callable[..., Tensor]
    lacks: Callable[[AttentionCall, torch.device], str | None]
    prepare: Callable[[PackedSequences, Iterable[int | None]], None] = _prepare_nothing
    """Makes the masks of all windows once per batch, before any layer runs; ``attend`` would make them in a layer."""


IMPLEMENTATIONS = {
    "flash_attention_3": Implementation(attend_flash(3), _flash_lacks(3, "has_sinks", "has_dropout")),
    "flash_attention_4": Implementation(attend_flash_4, _flash_lacks(4, "has_dropout")),
    LONG: Implementation(attend_long, _long_lacks),
    "flash_attention_2": Implementation(attend_flash(2), _flash_lacks(2, "has_sinks")),
    "varlen_attn": Implementation(attend_varlen, _varlen_lacks),
    "flex_attention": Implementation(attend_flex, _flex_lacks, prepare_flex),
    "per_sequence": Implementation(attend_per_sequence, _nothing_lacks),
}
"""Best first; the last has no limits."""


def implementations(device_type: str) -> dict[str, Implementation]:
    """Return the implementations that plugins registered for the device, by priority, and then the built-in ones.

    A plugin registers a function like those of ``IMPLEMENTATIONS`` as the operator "packed_attention"; its ``when``
    takes an ``AttentionCall`` and a device.
    """
    return _offered(device_type) | IMPLEMENTATIONS


@functools.cache
def _offered(device_type: str) -> dict[str, Implementation]:
    entries = [entry for entry in registry().ops.get(OPERATOR, ()) if entry.device_type in (device_type, "*")]
    return {
        entry.name: Implementation(resolve(entry.path), resolve(entry.when) if entry.when else _nothing_lacks)
        for entry in sorted(entries, key=lambda entry: -entry.priority)
    }


# ------------------------------------------------------------------------------------------------------ choosing


def are_long(calls: frozenset[AttentionCall], num_layers: int, runs: Iterable[tuple[int, int]]) -> bool:
    """Return True if all sequences are so long that cuDNN's plans pay; ``runs`` are (count, length), as it plans."""
    width = min((call.query_heads * call.head_dim for call in calls), default=0)
    work = [2 * num_layers * width * count * length**2 for count, length in runs]  # two products, half of each seen
    return min(work, default=0) >= _LONG_WORK


def choose(
    calls: frozenset[AttentionCall],
    device: torch.device,
    dtype: torch.dtype,
    implementation: str | None = None,
    *,
    of_long: bool = False,
    reasons: Reasons | None = None,
) -> AttentionChoice:
    """Return the first implementation that serves all ``calls``; ``implementation`` asks for one by name.

    Args:
        of_long: for packs that ``are_long``.
        reasons: what ``why_not`` returned for earlier choices. It is not asked again, and what it returns is added.

    Raises:
        InvalidInputError: no such implementation.
        UnsupportedError: the requested one cannot serve them; says why.
    """
    known = implementations(device.type)
    if implementation is not None and implementation not in known:
        raise InvalidInputError(f"packed attention has {', '.join(known)}; got {implementation!r}")
    reasons = {} if reasons is None else reasons

    def known_reason(*asked: Any) -> str | None:
        if asked not in reasons:
            reasons[asked] = why_not(*asked)
        return reasons[asked]

    refused: list[tuple[str, str]] = []
    for name in known if implementation is None else [implementation]:
        asked = known_reason if name != LONG or of_long or implementation else _why_not_short
        reason = next((found for call in sorted(calls, key=repr) if (found := asked(name, call, device, dtype))), None)
        if reason is None:
            choice = AttentionChoice(name, tuple(refused))
            logger.info("packed attention in %s on %s: %s", dtype, device.type, str(choice).replace("\n", "; "))
            return choice
        refused.append((name, reason))
    raise UnsupportedError(f"packed attention in {dtype} on {device.type} by {implementation!r}", refused[-1][1])


def why_not(name: str, call: AttentionCall, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why an implementation cannot serve the call here, or None: its limits first, then its probe."""
    planned = planned_device(device)
    if planned is not None:
        reason = _why_not_planned(name, call, planned, dtype)
        if reason is None and name != "per_sequence" and (apart := apart_from_step()) is not None:
            with apart:
                _plan_probe(name, call, dtype, device)
        return reason
    reason = implementations(device.type)[name].lacks(call, device)
    if reason is not None or name == "per_sequence":
        return reason
    return probing.why_not(_probe, name, call, dtype, device=device)


def _why_not_short(name: str, call: AttentionCall, device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why what is for long sequences does not run others; nothing is tried."""
    for_long = (
        f"it runs only packs in which every run of equal lengths has at least {_LONG_WORK:.0e} multiplications and "
        "additions; ask with of_long=True"
    )
    return implementations(device.type)[name].lacks(call, device) or for_long


def _runs_by_cudnn(call: AttentionCall, device: torch.device, dtype: torch.dtype) -> bool:
    sizes = [(call.query_heads, call.head_dim), (call.kv_heads, call.head_dim), (call.kv_heads, call.value_dim)]
    qkv = (
        torch.empty(1, n, sum(_PROBE_LENGTHS), width, device=device, dtype=dtype, requires_grad=True)
        for n, width in sizes
    )
    return takes_cudnn(*qkv)


def _why_not_planned(name: str, call: AttentionCall, planned: PlannedDevice, dtype: torch.dtype) -> str | None:
    """Return the reason why an implementation would not serve the call on a device that is not asked.

    Packages that may be installed there are left out: their memory is that of torch's own kernels. So are
    ``long_sequences``: they keep what ``varlen_attn`` keeps, but for a sixteenth more of queries, keys and values at
    most, and what cuDNN's backward takes inside is not known.
    """
    if name == "per_sequence":
        return None
    if planned.arch < _FLASH_ARCH or name.startswith("flash_attention") or name == LONG:
        return f"it is not planned with on {planned.type}"
    if name != "varlen_attn":
        return None
    if dtype not in {torch.bfloat16, torch.float16} or call.head_dim > _FLASH_HEAD:
        return f"its kernels take heads of at most {_FLASH_HEAD} values in 16 bits"
    if call.value_dim != call.head_dim:
        return f"its kernels take values as wide as keys, got {call.value_dim} and {call.head_dim}"
    return IMPLEMENTATIONS[name].lacks(call, torch.device("meta"))


def _plan_probe(name: str, call: AttentionCall, dtype: torch.dtype, device: torch.device) -> None:
    """Take the memory of a probe, which decides where later tensors lie; without values there is nothing to compare.

    A thread of its own would not be seen by the plan. So what a thread would not have is set aside here.
    """
    with torch.inference_mode(mode=False), torch.enable_grad(), saved_tensors_hooks(_same, _same):
        _probe(name, call, dtype, device)


def _same(saved: Tensor) -> Tensor:
    return saved


def _probe(name: str, call: AttentionCall, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why the results or gradients of ``name`` are wrong, or None."""
    if name == LONG and not _runs_by_cudnn(call, device, dtype):
        return f"torch takes another kernel than cuDNN's for it in {dtype}"
    packs = _LONG_PROBE_LENGTHS if name == LONG else (_PROBE_LENGTHS,)
    return next(filter(None, (_fault(name, call, dtype, device, lengths) for lengths in packs)), None)


def _fault(
    name: str, call: AttentionCall, dtype: torch.dtype, device: torch.device, lengths: tuple[int, ...]
) -> str | None:
    call = call._replace(window=call.window and _PROBE_WINDOW)
    total = sum(lengths)
    sizes = [(call.query_heads, call.head_dim), (call.kv_heads, call.head_dim), (call.kv_heads, call.value_dim)]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, total, width, generator=generator) for heads, width in sizes]
    weight = torch.randn(1, total, call.query_heads, call.value_dim, generator=generator).to(device)
    if call.has_sinks:
        inputs.append(torch.randn(call.query_heads, generator=generator))
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    packed = PackedSequences(cu_seqlens, lengths, lambda *_: name)
    module = SimpleNamespace(training=True, is_causal=True)
    options = {"scaling": call.head_dim**-0.5, "sliding_window": call.window, "softcap": call.softcap}

    def run(fn: Callable[..., Tensor], compute: torch.dtype) -> list[Tensor]:
        leaves = [x.to(device, dtype).to(compute).requires_grad_() for x in inputs]
        sinks = leaves[3] if call.has_sinks else None
        output = fn(module, *leaves[:3], packed, **options, s_aux=sinks)
        loss = (output.to(compute) * weight.to(compute)).sum()
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)  # 0 for sinks that are ignored
        return [output.detach(), *gradients]

    wide = torch.promote_types(dtype, torch.float32)
    results = run(implementations(device.type)[name].attend, dtype), run(_definition, wide)
    errors = [float((found.to(wide) - right).norm() / right.norm()) for found, right in zip(*results, strict=True)]
    for part, error in zip(("output", "dq", "dk", "dv", "gradient of the sinks"), errors, strict=False):
        if not error <= _TOLERANCE.get(dtype, 0.0):
            return f"its probe gave a wrong {part}: relative error {error:.1e}"
    return None


def _definition(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Compute packed attention in plain torch, with the whole score matrix in memory."""
    group, total = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(group, 1).mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(total, device=query.device)
    sequence = torch.searchsorted(packed.cu_seqlens[1:], row, right=True)
    apart = row[:, None] - row
    seen = (sequence[:, None] == sequence) & (apart >= 0) & (apart < (sliding_window or total))
    scores = scores.masked_fill(~seen, float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores).view(1, -1, 1, 1).expand(-1, -1, total, 1)], dim=-1)
    return (scores.softmax(-1)[..., :total] @ value.repeat_interleave(group, 1)).transpose(1, 2)
