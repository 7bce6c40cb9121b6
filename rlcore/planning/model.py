"""The model of a plan: a module on the meta device, made from a config.json alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlcore.errors import CheckpointError, InvalidInputError, MissingDependencyError, one_line
from rlcore.meta import meta_device
from rlcore.nn import HuggingFaceTrainModule, TrainModule

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw_of(**options: Any) -> MakeOptimizer:
    """Return a maker of torch's AdamW with these options."""
    return lambda parameters: torch.optim.AdamW(parameters, **options)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model without weights."""

    module: TrainModule
    config: Any
    """transformers' configuration; None of a module that has none."""
    name: str

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)


def planned_model(
    model: str | Path | TrainModule | Any,
    *,
    lora: Mapping[str, Any] | int | None = None,
    optimizer: MakeOptimizer | None = None,
) -> PlannedModel:
    """Return the module of a folder with a config.json, of such a file, of transformers' configuration, or as given.

    Args:
        optimizer: makes the optimizer of the trained parameters; None is torch's fused AdamW.
        lora: the rank of adapters on all linear layers but the head, or the arguments of ``peft.LoraConfig``.

    Raises:
        CheckpointError: the config.json is missing, damaged, or of no causal language model.
        InvalidInputError: what is given is none of these.
    """
    if isinstance(model, TrainModule):
        if lora is not None:
            raise InvalidInputError("lora= is for a model that is given by its configuration; add them to the module")
        return PlannedModel(model, getattr(model, "config", None), type(model).__name__)
    config = _config_of(model)
    transformers = _transformers()
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise CheckpointError(f"{model} is a {config.model_type!r} model, which is not a causal language model")

    make = optimizer or adamw_of(fused=True)

    class PlannedPolicy(HuggingFaceTrainModule, known[type(config)]):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            self.optimizer = make([one for one in self.parameters() if one.requires_grad])

    try:
        with meta_device():
            module = PlannedPolicy._from_config(config)
    except Exception as error:  # of the model's own code
        raise CheckpointError(f"no model can be made of {model}: {one_line(error)}") from error
    if lora is not None:
        _add_adapters(module, lora)
    return PlannedModel(module, config, str(getattr(config, "_name_or_path", "") or model))


def _config_of(model: Any) -> Any:
    if not isinstance(model, str | Path):
        if hasattr(model, "model_type"):
            return model
        raise InvalidInputError(
            "a plan takes a model folder, a config.json, transformers' configuration, or a TrainModule made under "
            f"rlcore.meta_device(), got {type(model).__name__}"
        )
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is no configuration of a model: {one_line(error)}; name a model folder or its config.json"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise CheckpointError(f"{file} has no model_type; name the config.json of a Hugging Face model")
    transformers = _transformers()
    try:
        return transformers.AutoConfig.for_model(**found)
    except Exception as error:  # of many types
        raise CheckpointError(f"transformers cannot read {file}: {one_line(error)}") from error


def _add_adapters(module: Any, lora: Mapping[str, Any] | int) -> None:
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError("peft", needed_for="a plan with lora", extra="hf") from error
    given: dict[str, Any] = {"r": lora, "target_modules": "all-linear"} if isinstance(lora, int) else dict(lora)
    try:
        arguments = peft.LoraConfig(**given)
        with meta_device():
            module.add_adapter(arguments)
    except Exception as error:  # of many types
        raise InvalidInputError(f"lora={lora!r} cannot be added to this model: {one_line(error)}") from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError("transformers", needed_for="a plan", extra="hf") from error
    return transformers
