"""How far two right ways to compute a transformer's log-probs may lie apart: by its shapes and its weights."""

from __future__ import annotations

import json
from pathlib import Path

from tests.accuracy import rounding


def logprob_rounding(folder: Path, num_tokens: int) -> float:
    """Return the largest difference of two log-probs in float32, of a model of Llama's, Qwen2's or Gemma's kind.

    A log-prob is a logit less a logarithm of a sum. No partial sum of a logit is above the length of what the last norm
    gives, times the length of the token's row of the output weight. Each layer adds to what it was given, so that the
    roundings of all layers follow each other. Both ways round both parts. A Gemma's norms multiply by 1 more than their
    weight, and some of them have two more; a cap on logits brings none further apart.

    Args:
        folder: as ``save_pretrained`` writes it.
        num_tokens: of the longest sequence.
    """
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    is_gemma = config["model_type"].startswith("gemma")
    norms = (4 if is_gemma else 2) * hidden
    # What goes into attention, scores, probabilities, their mean, what comes out; up and down again.
    layer = norms + (hidden + head + 2 * num_tokens + heads * head) + (hidden + config["intermediate_size"])
    terms = config["num_hidden_layers"] * layer + 2 * hidden + config["vocab_size"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = file.keys()
        output = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
        rows, scale = file.get_tensor(output).double(), file.get_tensor("model.norm.weight").double() + is_gemma
    reach = hidden**0.5 * float((rows * scale).norm(dim=1).max())
    num_rounded = 2 * 2  # the logit and the logarithm, each way
    return rounding(terms) * num_rounded * reach
