"""The results of the parts of a decoder, by names that transformers and vLLM have in common.

Letters: T tokens, H width.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ROLES = {
    "embedding": "embedding",
    "input_norm": "norm",
    "attention": "attention",
    "norm_behind_attention": "norm",
    "router": "router",
    "mlp": "mlp",
    "layer": "residual stream",
    "norm": "norm",
    "head": "head",
}
"""Part -> its kind, in the order in which a layer computes them; the last two follow all layers."""
_IN_LAYER = {
    "input_layernorm": "input_norm",
    "self_attn": "attention",
    "post_attention_layernorm": "norm_behind_attention",
    "mlp": "mlp",
    "block_sparse_moe": "mlp",
    "feed_forward": "mlp",
    "": "layer",
}
_OUTSIDE = {
    "embed_tokens": "embedding",
    "norm": "norm",
    "final_layernorm": "norm",
    "lm_head": "head",
    "logits_processor": "head",
}


def part_of(name: str) -> str | None:
    """Return the part that a module is, such as "layers.3.attention" or "embedding"; None if it is none of them."""
    inside = re.search(r"(?:^|\.)layers\.(\d+)(?:\.(.*))?$", name)
    if inside is None:
        return _OUTSIDE.get(name.rpartition(".")[2])
    path = inside[2] or ""
    block, _, child = path.rpartition(".")
    is_router = _IN_LAYER.get(block) == "mlp" and child in ("gate", "router")
    part = "router" if is_router else _IN_LAYER.get(path)
    return part and f"layers.{inside[1]}.{part}"


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names of parts in the order in which a decoder computes them."""
    roles = list(ROLES)

    def place(name: str) -> tuple[int, int]:
        _, _, rest = name.partition("layers.")
        layer, _, part = rest.partition(".")
        return (int(layer), roles.index(part)) if rest else (-1 if name == "embedding" else 1 << 30, roles.index(name))

    return sorted(names, key=place)


@contextlib.contextmanager
def recording(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inside, keep what each part returns at its last call, [T, H] on the host, by the name of the part."""
    found: dict[str, Tensor] = {}
    hooks = [
        child.register_forward_hook(partial(_keep, found, part))
        for name, child in module.named_modules()
        if (part := part_of(name)) is not None
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _keep(found: dict[str, Tensor], part: str, module: nn.Module, args: Any, output: Any) -> None:
    tensors = [one for one in (output if isinstance(output, tuple) else (output,)) if isinstance(one, Tensor)]
    if not tensors:
        return
    value = tensors[0].detach()
    if part.endswith(".layer") and len(tensors) > 1:  # vLLM adds the residual in the next norm
        value = value + tensors[1].detach()
    found[part] = value.flatten(0, -2).to("cpu", copy=True)


def last_logits(hidden_TH: Tensor, head: Any) -> Tensor:
    """Return the logits [1, V] of the last token, in the dtype of the weights."""
    logits: Tensor = head.form(torch.nn.functional.linear(hidden_TH[-1:].to(head.weight.dtype), head.weight, head.bias))
    return logits
