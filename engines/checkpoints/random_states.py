"""The states of a worker's random generators, as tensors of a checkpoint."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlcore.collectives.default_group import rank_and_size
from rlcore.device import Device
from rlcore.engines.checkpoints.damage import DamageError
from rlcore.engines.checkpoints.saved_tensor import OF_EACH_RANK, SavedTensor

_log = logging.getLogger(__name__)
_NAMES = ("cpu", "device", "python", "gauss")


def random_states(device: Device) -> dict[str, Tensor]:
    """Return the states of this rank.

    Python's is 625 numbers, and the second of a pair of Gaussian ones if the first has been given.
    """
    _, internal, gauss = random.getstate()
    states = (
        torch.get_rng_state(),
        device.rng_state(),
        torch.tensor(internal),
        torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    )
    return {_name(rank_and_size()[0], name): value for name, value in zip(_NAMES, states, strict=True)}


def random_states_of(device: Device) -> str:
    """Say which workers the states can be given back to."""
    size = rank_and_size()[1]
    return f"{size} {device.type} worker{'s' * (size > 1)}"


def setter_of_random_states(saved: Mapping[str, SavedTensor], saved_of: str, device: Device) -> Callable[[], None]:
    """Return a function that puts this rank's states back; all of them have been read and tried.

    When the states are those of another number or kind of workers, the function seeds the generators anew.

    Raises:
        DamageError: a state is missing, or is no state of its generator.
    """
    rank, size = rank_and_size()
    if saved_of == (now := random_states_of(device)):
        return _setter_of_states({name: _read(saved, rank, name) for name in _NAMES}, rank, device)
    seed = int(_read(saved, 0, "python")[0]) * size + rank

    def start_anew() -> None:
        _log.warning(
            "the checkpoint is of %s, and this engine has %s: random generators start from new seeds", saved_of, now
        )
        torch.manual_seed(seed)
        random.seed(seed)

    return start_anew


def _setter_of_states(states: Mapping[str, Tensor], rank: int, device: Device) -> Callable[[], None]:
    gauss = states["gauss"].tolist()
    python = (3, tuple(states["python"].tolist()), gauss[0] if gauss else None)
    try:
        random.Random().setstate(python)
        torch.Generator().set_state(states["cpu"])
    except (RuntimeError, TypeError, ValueError) as error:
        raise DamageError(_file(rank), f"it holds no state of a generator: {error}") from error
    own, given = device.rng_state(), states["device"]
    if (own.dtype, own.shape) != (given.dtype, given.shape):
        raise DamageError(
            _file(rank),
            f"it holds no state of this device's generator, which has {list(own.shape)} of {own.dtype}, and not "
            f"{list(given.shape)} of {given.dtype}",
        )

    def set_states() -> None:
        torch.set_rng_state(states["cpu"])
        device.set_rng_state(given)
        random.setstate(python)

    return set_states


def _read(saved: Mapping[str, SavedTensor], rank: int, name: str) -> Tensor:
    if (found := saved.get(_name(rank, name))) is None:
        raise DamageError(_file(rank), f"it has no {_name(rank, name)}")
    return found.read()


def _name(rank: int, name: str) -> str:
    return f"{OF_EACH_RANK}{rank}-{name}"


def _file(rank: int) -> Path:
    return Path(f"rng-{rank}.safetensors")
