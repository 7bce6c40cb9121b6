"""Which of transformers' conversions a checkpoint needs, by transformers' own notes and, before 5.7, by its names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.weights.stored import _used

transformers = pytest.importorskip("transformers")
loading = pytest.importorskip("transformers.core_model_loading")


def patterns(conversions: list[Any]) -> list[tuple[str, tuple[str, ...]]]:
    return [(type(each).__name__, tuple(each.source_patterns)) for each in conversions]


def model_and_names(family: str) -> tuple[Any, list[str]]:
    """Return a model on meta and the names of its checkpoints, in which experts are apart."""
    common = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 2} if family == "Mixtral" else {}
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, f"{family}Config")(**common, **heads, **experts)
        )
    return model, [*loading.revert_weight_conversion(model, model.state_dict())]


@pytest.mark.parametrize("family", ["Qwen2", "Mixtral"])
def test_an_older_transformers_is_asked_by_the_names(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = model_and_names(family)
    own = [*model.state_dict()]  # as if the file held what the model does
    found = [patterns(_used(model, each)) for each in (names, own)]
    if hasattr(loading.WeightTransform, "was_used"):
        monkeypatch.delattr(loading.WeightTransform, "was_used")
        assert [patterns(_used(model, each)) for each in (names, own)] == found
    assert (len(found[0]) > 0) == (family == "Mixtral") and found[1] == []
