"""The output heads of all causal and image-text classes of transformers, as a table for docs/engines.md.

python -m tests.base.output_heads
"""

from __future__ import annotations

import logging
import warnings
from typing import Any, NamedTuple

import torch

from rlcore.errors import RlcoreError, one_line
from rlcore.nn import HuggingFaceTrainModule

REFUSED, NOT_MADE = "refused", "not made"

LACKING: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
}
"""Options that a config needs and has no default for, by model type."""


class FoundHead(NamedTuple):
    """The class, and its logits as a formula, or why there is none."""

    class_name: str
    model_type: str
    formula: str
    reason: str = ""


def model_classes() -> dict[str, str]:
    """Return the model type of each class, by the names of the classes in their order."""
    from transformers.models.auto import modeling_auto

    classes: dict[str, str] = {}
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for model_type, names in mapping.items():
            for name in [names] if isinstance(names, str) else names:
                classes.setdefault(name, model_type)
    return dict(sorted(classes.items()))


def found_head(name: str, model_type: str) -> FoundHead:
    import transformers

    model_class = getattr(transformers, name)
    policy = type(name, (HuggingFaceTrainModule, model_class), {})
    try:
        config = model_class.config_class(**LACKING.get(model_type, {}))
        with torch.device("meta"):
            module = policy(config)
    except Exception as error:
        return FoundHead(name, model_type, NOT_MADE, one_line(error))
    try:
        head = module.output_head()
    except RlcoreError as error:
        return FoundHead(name, model_type, REFUSED, str(error))
    return FoundHead(name, model_type, _formula(head.softcap, head.logit_scale))


def _formula(softcap: float | None, logit_scale: float) -> str:
    bent = "z" if softcap is None else f"{softcap:.4g} tanh(z / {softcap:.4g})"
    return bent if logit_scale == 1 else f"{logit_scale:.4g} {bent}"


def table() -> str:
    """Return the formulas, and the classes that have each."""
    by_formula: dict[str, list[str]] = {}
    for found in map(found_head, *zip(*model_classes().items(), strict=True)):
        by_formula.setdefault(found.formula, []).append(found.class_name)
    rows = sorted(by_formula.items(), key=lambda row: (row[0] in {REFUSED, NOT_MADE}, -len(row[1]), row[0]))
    lines = ["| logits, z = hidden @ weight.T + bias | classes |", "| --- | --- |"]
    for formula, names in rows:
        shown = f"{len(names)}: all others" if formula == "z" else f"{len(names)}: {', '.join(names)}"
        lines.append(f"| {formula if formula in {REFUSED, NOT_MADE} else f'`{formula}`'} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(table())
