"""The module contract: an algorithm is methods on a ``torch.nn.Module`` that an engine runs.

A policy that trains a Qwen2::

    class Policy(rlcore.nn.HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self):
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-6)

    with rlcore.meta_device():
        module = Policy.from_pretrained(path)     # reads only the config

The module is built with its parameters on the meta device, so that it is small to send; a worker materializes it.

Letters: T packed tokens, N sequences, L longest sequence, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rlcore._torch_private import schedulers_in
from rlcore.compute_dtype import as_stored
from rlcore.errors import (
    CheckpointError,
    InvalidInputError,
    MissingDependencyError,
    RlcoreError,
    UnsupportedError,
    one_line,
)
from rlcore.image_inputs import ImageInputs, prepared
from rlcore.logit_form import LogitForm, measure_logit_form
from rlcore.meta import meta_device, parameters_land_on_meta, without_foreign_meta
from rlcore.sequence_input import SequenceInput
from rlcore.weights.adapters import adapted_layers
from rlcore.weights.catalog import weights_of
from rlcore.weights.stored import Conversion
from rlcore.weights.view import Adapters, WeightView, named_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlcore.packed.sequence_parallel import SequenceGroup
    from rlcore.parallel_plans import Meshes, Sizes

_log = logging.getLogger(__name__)

Batch = Mapping[str, Tensor]
"""Packed: ``input_ids`` [T] int64 on the device, and ``cu_seqlens`` [N+1] int32 on the host, where sequences begin.

With inputs beside the tokens, also the rows of each, [R, ...] on the device, joined in the order of the sequences.
"""

_BESIDE_WEIGHTS = (
    "*token*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
)
"""Files of a model folder that training does not change."""


class OutputHead(NamedTuple):
    """logits = logit_scale * softcap(hidden @ weight.T + bias); the arguments of ``rlcore.ops.linear_loss``."""

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None = None
    """[V]."""
    softcap: float | None = None
    logit_scale: float = 1.0
    group: ProcessGroup | None = None
    """The ranks that have the rows of the weight among them (tensor parallelism): ``weight`` is then this rank's."""

    @property
    def form(self) -> LogitForm:
        return LogitForm(self.softcap, self.logit_scale)


class TrainModule(nn.Module):
    """The members that a train engine needs. ``HuggingFaceTrainModule`` implements all of them for transformers."""

    new_parameters: tuple[str, ...] = ()
    """Prefixes of parameters that the checkpoint need not hold, such as a fresh value head."""

    def materialization_source(self) -> Path | Mapping[str, Tensor]:
        """Return the source of the weights: a safetensors file, a folder of such files, or named tensors."""
        raise NotImplementedError(f"{type(self).__name__} must define materialization_source()")

    def on_weights_materialized(self) -> None:
        """Make optimizers and schedulers. The worker calls this once the weights are on the device."""

    def hidden_states(self, batch: Batch) -> Tensor:
        """Return the last hidden state [T, H] of every token of a packed batch; sequences must not see each other."""
        raise NotImplementedError(f"{type(self).__name__} must define hidden_states(batch) to use train_batch")

    def prepare_inputs(self, packed: Batch, inputs: Mapping[str, SequenceInput]) -> Mapping[str, SequenceInput]:
        """Check the inputs of a batch beside its tokens; return all that ``hidden_states`` needs of that kind.

        It is called in the user's process, on the module without weights, before anything is changed. What it returns
        is cut as the sequences are, and each micro-batch has the rows of its own.

        Args:
            packed: the batch, on the host.

        Raises:
            InvalidInputError: names the sequence, and what is wrong.
        """
        if inputs:
            raise InvalidInputError(
                f"the batch has {', '.join(sorted(inputs))} beside its tokens, and {type(self).__name__} takes none of "
                "that: train a model that reads images, or leave them out"
            )
        return {}

    def check_sequence_parallel(self, num_ranks: int) -> None:
        """Raise UnsupportedError, with the reason, if so many ranks cannot share the rows of ``hidden_states``."""
        raise UnsupportedError(
            f"sequence_parallel_size={num_ranks} of {type(self).__name__}",
            "it does not define check_sequence_parallel() and share_sequences(); "
            "rlcore.nn.HuggingFaceTrainModule does, for transformers models",
        )

    def share_sequences(self, group: SequenceGroup) -> None:
        """Let the ranks of a group share each row from now on, after ``check_sequence_parallel`` has agreed.

        All of them then call ``hidden_states`` with the same batch, and each returns the states of its own tokens
        alone, those of ``rlcore.packed.sequence_parallel.own_tokens``.
        """
        self.check_sequence_parallel(group.size)

    def check_split(self, sizes: Sizes) -> None:
        """Raise UnsupportedError, with the reason, if so many ranks cannot share each weight."""
        raise UnsupportedError(
            f"tensor_parallel_size={sizes.tensor} and expert_parallel_size={sizes.experts} of {type(self).__name__}",
            "it does not define check_split() and split(); rlcore.nn.HuggingFaceTrainModule does, for transformers "
            "models",
        )

    def split(self, meshes: Meshes) -> list[nn.Module]:
        """Cut the parameters, which are on meta, among the ranks of tensor and expert parallelism.

        Returns:
            The modules that are on ``meshes.experts``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define split() if check_split() agrees")

    def measure_head(self) -> None:
        """Find out what ``output_head()`` needs to know of the whole module, before its weights are sharded."""

    def output_head(self) -> OutputHead:
        """Return the projection from hidden states to logits."""
        raise NotImplementedError(f"{type(self).__name__} must define output_head() to use train_batch")

    def weight_views(self, adapters: Adapters = "merged") -> Iterator[WeightView]:
        """Yield every weight by its checkpoint name, tied ones once, with the parameter that holds it.

        Materialization, ``named_weights()``, weight sync, ``state_dict`` and ``export`` all use these views. Override
        the method for other names, other views, or weights that are computed.

        Args:
            adapters: "merged": the base weights with the adapters added, computed on request; "base": the weights
                without adapters, as a checkpoint holds them; "only": those of the active adapters.
        """
        yield from weights_of(self, adapters)

    def named_weights(self, adapters: Adapters = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of ``weight_views()`` by name: parameters, DTensors where they are sharded, and views.

        A view of a sharded parameter is a view of the gathered parameter, so all ranks iterate together to the end.
        """
        yield from named_tensors(self.weight_views(adapters))

    def wrap_classes(self) -> Collection[str]:
        """Return the class names of the blocks, which are gathered, recomputed and compiled one at a time."""
        return ()

    def stored_names(self, names: Collection[str]) -> Mapping[str, str] | None:
        """Return the names in the source by those of this module.

        Args:
            names: of the tensors that ``materialization_source()`` has.

        Returns:
            Name in ``weight_views()`` or in this module -> name in the source; None where tensors must be converted.
        """
        return {name: name for name in names}

    def converted_weights(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return all weights in host memory by this module's names, where the source's tensors must be converted.

        Raises:
            CheckpointError: a parameter is missing, or of another shape.
        """
        raise NotImplementedError(f"{type(self).__name__} must define converted_weights() if it needs conversion")

    def export_config(self, folder: Path) -> None:
        """Write the other files of a model folder, such as config and tokenizer."""


class HuggingFaceTrainModule(TrainModule):
    """Mix in before a transformers model class: ``class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM)``."""

    config: Any
    _no_split_modules: Any
    base_model_prefix: str
    _source: Path
    _conversion: Conversion | None = None
    _logit_form: LogitForm | None = None
    _meshes: Any = None  # Meshes | None: transformers reads the annotations of a class, by what is imported here

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> Any:
        """Make the model as in transformers; under ``rlcore.meta_device()`` only its config is read."""
        if not parameters_land_on_meta():
            cls._take_over_conversions()
            return super().from_pretrained(path, **kwargs)  # type: ignore[misc]
        config = kwargs.pop("config", None) or _read_config(cls, path)
        with errors_named(path, f"{cls.__name__} cannot be made of"), without_foreign_meta(), meta_device():
            module = cls._from_config(config, **kwargs)  # type: ignore[attr-defined]
        module._source = Path(path)
        module.measure_head()  # the first to hear of another form is the user, before any worker starts
        return module

    def materialization_source(self) -> Path:
        return self._source

    def hidden_states(self, batch: Batch) -> Tensor:
        # An optional package, which is installed if this class is used.
        from rlcore.packed.attention import packed_hidden_states
        from rlcore.packed.images import PackedImages

        decoder = self.get_decoder()  # type: ignore[operator]
        images = PackedImages.of(self, batch)
        return packed_hidden_states(decoder, batch["input_ids"], batch["cu_seqlens"], images=images)

    def prepare_inputs(self, packed: Batch, inputs: Mapping[str, SequenceInput]) -> Mapping[str, SequenceInput]:
        images = ImageInputs.of(self)
        return super().prepare_inputs(packed, inputs) if images is None else prepared(images, packed, inputs)

    def check_sequence_parallel(self, num_ranks: int) -> None:
        from rlcore.packed.attention import why_not_shared

        if reason := why_not_shared(self.get_decoder(), num_ranks):  # type: ignore[operator]
            raise UnsupportedError(f"sequence_parallel_size={num_ranks} of {type(self).__name__}", reason)

    def share_sequences(self, group: SequenceGroup) -> None:
        from rlcore.packed.attention import share_sequences

        share_sequences(self.get_decoder(), group)  # type: ignore[operator]

    def check_split(self, sizes: Sizes) -> None:
        from rlcore.parallel_plans import why_not_split

        if reason := why_not_split(self, sizes):
            given = {"tensor_parallel_size": sizes.tensor, "expert_parallel_size": sizes.experts}
            asked = " and ".join(f"{name}={size}" for name, size in given.items() if size > 1)
            raise UnsupportedError(f"{asked} of {type(self).__name__}", reason)

    def split(self, meshes: Meshes) -> list[nn.Module]:
        from rlcore.parallel_plans import split

        self.measure_head()  # of the whole model
        self._meshes = meshes
        return split(self, meshes)

    def output_head(self) -> OutputHead:
        head = self.get_output_embeddings()  # type: ignore[operator]
        if head is not None and adapted_layers(head):
            raise UnsupportedError("an adapter on the output head", "the loss reads its weight, and would miss it")
        form, bias = self._measured_form(), getattr(head, "bias", None)
        if self._meshes is None or getattr(head.weight, "device_mesh", None) != self._meshes.tensor:
            return OutputHead(head.weight, bias, form.softcap, form.logit_scale)
        own_bias = None if bias is None else bias.to_local()
        group = self._meshes.tensor.get_group()
        return OutputHead(head.weight.to_local(), own_bias, form.softcap, form.logit_scale, group)

    def measure_head(self) -> None:
        if self.get_output_embeddings() is None:  # type: ignore[operator]
            return
        is_own = type(self).output_head is HuggingFaceTrainModule.output_head
        with nullcontext() if is_own else suppress(UnsupportedError):
            self._measured_form()

    def _measured_form(self) -> LogitForm:
        if self._logit_form is None:
            with without_foreign_meta(), as_stored(self):  # its code is run on float64
                self._logit_form = measure_logit_form(self, self._transformers_class().forward)
        return self._logit_form

    def wrap_classes(self) -> Collection[str]:
        return tuple(self._no_split_modules or ())

    def weight_views(self, adapters: Adapters = "merged") -> Iterator[WeightView]:
        if self._conversion is None:
            self._conversion = Conversion.of_checkpoint(self._transformers_class(), self.config)
        yield from weights_of(self, adapters, self._conversion)

    def stored_names(self, names: Collection[str]) -> Mapping[str, str] | None:
        own = {name for name, _ in [*self.named_parameters(remove_duplicate=False), *self.named_buffers()]}
        stored = {name: name for name in names}
        self._conversion = Conversion.of_checkpoint(self._transformers_class(), self.config, names)
        views = list(self.weight_views("base"))
        if not self._is_complete(names, views):
            stored = _by_own_prefix(names, own, self.base_model_prefix)
            self._conversion = Conversion.of_checkpoint(self._transformers_class(), self.config, stored.keys())
            views = list(self.weight_views("base"))
        if any(not view.parts and view.name in stored for view in views):
            return None
        unexpected = stored.keys() - own - {view.name for view in views}
        if unexpected and not self._is_complete(stored.keys(), views):
            return None
        if unexpected:
            _log.warning("%s has no use for %s in %s", type(self).__name__, sorted(unexpected), self._source)
        return {name: found for name, found in stored.items() if name not in unexpected}

    def _is_complete(self, stored: Collection[str], views: Collection[WeightView]) -> bool:
        """Return True if the source has all parameters, by the names of their views or by their own."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)

        def has_values(tensor: Tensor) -> bool:
            return not isinstance(tensor, nn.Parameter) or any(name in stored for name in names[id(tensor)])

        def is_there(view: WeightView) -> bool:
            if view.name in stored or view.name.startswith(self.new_parameters):
                return True
            return bool(view.parts) and all(has_values(part.parameter) for part in view.parts)

        return all(map(is_there, views))

    @classmethod
    def _transformers_class(cls) -> Any:
        """Return transformers' class of the model, from which the user's class derives."""
        models = (base for base in cls.__mro__ if hasattr(base, "_from_config"))
        return next(base for base in models if not issubclass(base, TrainModule))

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Answer for transformers' class: transformers looks at the source of a class's module, here the user's, and
        would compute one expert after the other.
        """
        own = getattr(cls._transformers_class(), "_can_set_experts_implementation", None)
        return own is not None and bool(own())

    @classmethod
    def _take_over_conversions(cls) -> None:
        """Let transformers' loader convert what it converts for its own class; it finds conversions by a class's name.

        Without them a derived class would start with random weights where a file has other names.
        """
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )

        own = cls._transformers_class()
        if own.__module__.partition(".")[0] != "transformers":  # somebody's model, with names of its own
            return
        found = get_checkpoint_conversion_mapping(own.__name__)
        if found is None:
            found = get_checkpoint_conversion_mapping(own.config_class.model_type)
        if found is not None:
            register_checkpoint_conversion_mapping(cls.__name__, found, overwrite=True)

    def converted_weights(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        # transformers' own loader knows every checkpoint's renamed and fused tensors.
        self._take_over_conversions()
        with errors_named(self._source):
            loaded, report = super().from_pretrained(  # type: ignore[misc]
                self._source, config=self.config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        missing = sorted(name for name in report["missing_keys"] if not name.startswith(self.new_parameters))
        if missing or report["mismatched_keys"]:
            raise CheckpointError(
                f"{self._source} does not fit {type(self).__name__}: missing {missing}, "
                f"of another shape {sorted(map(str, report['mismatched_keys']))}. Use the model's own folder, or "
                "name parameters that start fresh in the class attribute `new_parameters`."
            )
        return dict(loaded.named_parameters(remove_duplicate=False)) | dict(loaded.named_buffers())

    def export_config(self, folder: Path) -> None:
        config = copy.deepcopy(self.config)
        config.architectures = [self._transformers_class().__name__]  # not the name of the user's class
        # of the widest, as whoever reads the folder rounds all weights to it
        config.dtype = functools.reduce(torch.promote_types, {parameter.dtype for parameter in self.parameters()})
        config.save_pretrained(folder)
        if self.can_generate():  # type: ignore[operator]
            self.generation_config.save_pretrained(folder)  # type: ignore[operator,union-attr]
        for file in (file for pattern in _BESIDE_WEIGHTS for file in self._source.glob(pattern)):
            shutil.copy(file, folder)


def optimizers_of(module: nn.Module) -> dict[str, Optimizer]:
    """Return every optimizer that the module holds, by its name: see ``_held``."""
    return _held(module, Optimizer)


def schedulers_of(module: nn.Module) -> dict[str, LRScheduler]:
    """Return every learning-rate scheduler that the module holds, but for those that another one steps."""
    found = _held(module, LRScheduler)
    parts = {id(part) for scheduler in found.values() for part in schedulers_in(scheduler)} if len(found) > 1 else ()
    return {name: one for name, one in found.items() if id(one) not in parts and not _is_set_aside(name, one)}


def _is_set_aside(name: str, scheduler: LRScheduler) -> bool:
    """Return True for one that takes a metric, in a list or dict: a method of the module steps it."""
    return "." in name and isinstance(scheduler, ReduceLROnPlateau)


T = TypeVar("T")
_LONGEST = 1000
"""A longer list, tuple or dict holds data, and is not looked through."""


def _held(module: nn.Module, kind: type[T]) -> dict[str, T]:
    """Return the attributes of a kind, and what lists, tuples and dicts among them hold: ``optimizers.0``.

    Each comes once, an attribute by its own name. What lies deeper is data: it may be large, and each step looks.
    """
    found: dict[int, tuple[str, T]] = {}
    containers: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if isinstance(value, kind):
            found.setdefault(id(value), (name, value))
        elif type(value) in {list, tuple, dict} and len(value) <= _LONGEST:
            containers.append((name, value))
    for name, value in containers:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for number, (key, part) in enumerate(pairs):
            if isinstance(part, kind):
                found.setdefault(id(part), (f"{name}.{key if isinstance(key, str) else number}", part))
    return dict(found.values())


def _by_own_prefix(names: Collection[str], own: Collection[str], prefix: str) -> dict[str, str]:
    """Return the file's names by the module's; where one of the two is a bare model, the other has a prefix."""
    start = f"{prefix}."

    def has_prefix(some: Collection[str]) -> bool:
        return any(name.startswith(start) for name in some)

    if not prefix or has_prefix(names) == has_prefix(own):
        return {name: name for name in names}
    if has_prefix(own):
        return {name if name in own else start + name: name for name in names}
    return {name.removeprefix(start): name for name in names}


def _read_config(cls: Any, path: str | Path) -> Any:
    with errors_named(path):
        return cls.config_class.from_pretrained(path, local_files_only=True)


@contextlib.contextmanager
def errors_named(path: str | Path, what: str = "cannot read the model at") -> Iterator[None]:
    """Turn any error of another library about a damaged folder into a CheckpointError that names the folder."""
    try:
        yield
    except RlcoreError:
        raise
    except Exception as error:  # they check little: damage shows as a KeyError or a division by zero
        raise CheckpointError(f"{what} {path}: {one_line(error)}; see to its config.json and its weights") from error


def safetensors_library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingDependencyError("safetensors", needed_for="reading model weights", extra="hf") from error
    return safetensors
