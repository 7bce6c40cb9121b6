"""The state that ZeRO trains, as checkpoints hold it, and back.

A checkpoint has the weights and the optimizer's states by parameter, each in rows of the ranks; so the executor fsdp2
writes and reads the same files. ZeRO has them as elements of flat float32 tensors. To save, the elements of one
parameter after the other are exchanged, and each rank keeps its rows of it in host memory. To load, each rank reads the
rows that have its elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.engines.checkpoints.optimizer_states import hyper_parameters, labels, like_own
from rlcore.engines.checkpoints.saved_tensor import SavedTensor, TensorPart
from rlcore.engines.checkpoints.train_state import Trained, TrainState, named_values
from rlcore.engines.deepspeed._deepspeed_private import elements, masters, publish_masters
from rlcore.engines.deepspeed.partitions import Partitions, is_partitioned
from rlcore.engines.deepspeed.zero import Zero
from rlcore.engines.executors.materialize import lacking
from rlcore.errors import CheckpointError
from rlcore.nn import TrainModule, optimizers_of, schedulers_of
from rlcore.weights.source import WeightSource

_STEP = "step"


class ZeroOptimizer:
    """The module's optimizer as checkpoints know it: by parameter, in the numbering of its groups."""

    def __init__(
        self, zero: Zero, groups: Sequence[Sequence[nn.Parameter]], state: Callable[[], dict[int, dict[str, Any]]]
    ) -> None:
        assert zero.optimizer is not None
        self._hyper = [
            {key: value for key, value in group.items() if key != "params"} for group in zero.optimizer.param_groups
        ]
        self._groups = groups
        self._state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [hyper | {"params": list(group)} for hyper, group in zip(self._hyper, self._groups, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        groups, first = [], 0
        for hyper, group in zip(self._hyper, self._groups, strict=True):
            groups.append(hyper | {"params": list(range(first, first + len(group)))})
            first += len(group)
        return {"state": self._state(), "param_groups": groups}


class Elements(NamedTuple):
    """The elements of a parameter that this rank steps."""

    flat: int
    """The number of the flat tensor that they are in."""
    offset: int
    """The first of them there."""
    start: int
    stop: int
    """[start, stop) of the parameter, numbered row by row."""


class ZeroTrainState:
    """Takes the state of a module under ZeRO for a checkpoint, and puts one back."""

    def __init__(self, zero: Zero, module: TrainModule, partitions: Partitions, class_name: str) -> None:
        self._zero = zero
        self._module = module
        self._partitions = partitions
        self._class_name = class_name
        self._elements = {
            id(parameter): Elements(*found)
            for parameter, *found in (elements(zero.zero_optimizer, zero.stage, zero.groups) if zero.optimizer else ())
        }

    def trained(self, *, with_values: bool, left_out: Collection[str] = ()) -> Trained:
        module, zero = self._module, self._zero
        with self._partitions.shaped(module):
            shapes = {name: (value, value.shape) for name, value in named_values(module) if name not in left_out}
            labels_by_id = labels(module)
        weights = {name: self._weight(value, shape, with_values) for name, (value, shape) in shapes.items()}
        optimizers: dict[str, Any] = {
            name: ZeroOptimizer(zero, zero.groups, self._optimizer_state) for name in optimizers_of(module)
        }
        return Trained(self._class_name, weights, left_out, labels_by_id, optimizers, schedulers_of(module))

    def _weight(self, value: Tensor, shape: torch.Size, with_values: bool) -> Tensor | TensorPart:
        found = self._elements.get(id(value))
        if not with_values:
            dtype = value.dtype if found is None else self._masters[found.flat].dtype
            return torch.empty(shape, dtype=dtype, device="meta")
        if found is not None:
            return self._rows(found, self._masters[found.flat], shape)
        if not is_partitioned(value):
            return value
        return own_rows(self._partitions.gathered(value))

    @property
    def _masters(self) -> list[Tensor]:
        return masters(self._zero.zero_optimizer, self._zero.stage)

    def _rows(self, found: Elements, flat: Tensor, shape: torch.Size) -> TensorPart:
        """Return this rank's rows of a parameter whose elements all ranks have parts of."""
        # as whole numbers, whose sum with zeros has the same bits whatever they are
        bits = torch.zeros(math.prod(shape) * flat.itemsize // 4, dtype=torch.int32, device=flat.device)
        own = flat.detach().narrow(0, found.offset, found.stop - found.start)
        whole = bits.view(flat.dtype)
        whole[found.start : found.stop] = own
        dist.all_reduce(bits)
        return own_rows(whole.view(shape))

    # ------------------------------------------------------------------------------------------ the optimizer

    def _optimizer_state(self) -> dict[int, dict[str, Any]]:
        """Return the state of each parameter by its number. All ranks call it together."""
        parameters = [parameter for group in self._zero.groups for parameter in group]
        states, flats = self._states(), self._masters
        found: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(parameters):
            own = self._elements.get(id(parameter))
            if own is None:  # frozen
                continue
            with self._partitions.shaped(self._module):
                shape = parameter.shape
            for key, value in states[own.flat].items():
                is_flat = isinstance(value, Tensor) and value.shape == flats[own.flat].shape
                found.setdefault(number, {})[key] = self._rows(own, value, shape) if is_flat else value
        return found

    def _states(self) -> list[dict[str, Any]]:
        assert self._zero.optimizer is not None
        return [self._zero.optimizer.state.get(flat, {}) for flat in self._masters]

    # --------------------------------------------------------------------------------------------------- back

    def lacking(self, source: WeightSource, names: Sequence[str]) -> list[str]:
        with self._partitions.shaped(self._module):
            return lacking(self._module, source, names)

    def read_again(self, source: WeightSource, names: Sequence[str]) -> None:
        self._partitions.read_again(self._module, source, names)

    @torch.no_grad()
    def restore(self, state: TrainState) -> None:
        """Put a checked state back; tensors are filled in place."""
        saved = state.tensors["weights"]
        with self._partitions.shaped(self._module):
            shapes = {name: (value, value.shape) for name, value in named_values(self._module)}
        for name, (value, shape) in shapes.items():
            found = self._elements.get(id(value))
            if found is not None:
                flat = self._masters[found.flat].detach()
                flat.narrow(0, found.offset, found.stop - found.start).copy_(
                    read_elements(saved[name], found.start, found.stop)
                )
            elif name not in saved:  # it was read from the module's source
                continue
            elif is_partitioned(value):
                self._partitions.store(value, saved[name].read())
            else:
                value.copy_(saved[name].read(tuple(slice(0, size) for size in shape)))
        if self._zero.optimizer is not None:
            publish_masters(self._zero.zero_optimizer, self._zero.stage)
            self._restore_optimizer(state)
        for name, scheduler in schedulers_of(self._module).items():
            scheduler.load_state_dict(like_own(scheduler.state_dict(), state.plain.schedulers[name]))
        state.set_random_states()

    def _restore_optimizer(self, state: TrainState) -> None:
        ((name, plain),) = state.plain.optimizers.items()
        by_parameter: dict[int, dict[str, SavedTensor]] = {}
        for path, tensor in state.tensors["optimizer"].items():
            _, index, key = path.rsplit("/", 2)
            by_parameter.setdefault(int(index), {})[key] = tensor
        optimizer = self._zero.optimizer
        assert optimizer is not None
        for group, hyper in zip(optimizer.param_groups, hyper_parameters(plain), strict=True):
            group.update({key: value for key, value in hyper.items() if key != "params"})
        parameters = [parameter for group in self._zero.groups for parameter in group]
        group_of = [number for number, group in enumerate(self._zero.groups) for _ in group]
        with self._partitions.shaped(self._module):
            has_dims = [bool(parameter.dim()) for parameter in parameters]
        # such as the step, and the product of NAdam's momenta; a parameter without dimensions has states like that
        scalars = {_STEP} | {
            key
            for number, own_states in by_parameter.items()
            for key, tensor in own_states.items()
            if has_dims[number] and not tensor.shape
        }
        made: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(parameters):
            own = self._elements.get(id(parameter))
            if own is None:  # frozen
                continue
            flat, target = self._masters[own.flat], made.setdefault(own.flat, {})
            for key, tensor in by_parameter.get(number, {}).items():
                if math.prod(tensor.shape) == 1 and key in scalars:
                    on_device = any(
                        optimizer.param_groups[group_of[number]].get(one) for one in ("fused", "capturable")
                    )
                    _put_once(target, key, tensor.read().to(flat.device if on_device else "cpu"), name)
                    continue
                if key not in target:
                    target[key] = torch.zeros_like(flat, requires_grad=False)
                target[key].narrow(0, own.offset, own.stop - own.start).copy_(
                    read_elements(tensor, own.start, own.stop)
                )
            for key, value in plain.values.get(number, {}).items():
                _put_once(target, key, value, name)
        for number, flat in enumerate(self._masters):
            optimizer.state.pop(flat, None)
            if made.get(number):
                optimizer.state[flat] = made[number]


def _put_once(target: dict[str, Any], key: str, value: Any, name: str) -> None:
    """Set a value that all parameters of a group must have alike, since ZeRO steps them as one tensor."""
    if key in target and not bool(target[key] == value):
        raise CheckpointError(
            f"parameters of one group of {name} have {key} {target[key]} and {value} in the checkpoint, and DeepSpeed "
            "steps them as one; load it with executor='fsdp2'"
        )
    target[key] = value


def own_rows(whole: Tensor) -> TensorPart:
    """Return this rank's rows of a tensor in host memory, cut as FSDP cuts parameters; a scalar is rank 0's."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if not whole.dim():
        rows = whole if rank == 0 else whole.new_empty(0)
        return TensorPart(rows.to("cpu", copy=True), [] if rank == 0 else [1], whole.shape)
    chunk = -(-whole.shape[0] // size)
    start = min(whole.shape[0], chunk * rank)
    rows = whole[start : min(whole.shape[0], start + chunk)]
    return TensorPart(rows.to("cpu", copy=True).contiguous(), [start, *[0] * (whole.dim() - 1)], whole.shape)


def read_elements(saved: SavedTensor, start: int, stop: int) -> Tensor:
    """Return the elements [start, stop) of a saved tensor, numbered row by row; the rows that have them are read."""
    if not saved.shape or start >= stop:
        return saved.read().reshape(-1)[start:stop] if not saved.shape else torch.empty(0)
    size = math.prod(saved.shape[1:])
    first, last = start // size, -(-stop // size)
    rows = saved.read((slice(first, last), *(slice(0, side) for side in saved.shape[1:])))
    return rows.reshape(-1)[start - first * size : stop - first * size]
