"""The states of a worker's random generators, as tensors of a checkpoint."""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from rlcore.collectives.default_group import rank_and_size
from rlcore.device import Device
from rlcore.engines.checkpoints.damage import DamageError
from rlcore.engines.checkpoints.saved_tensor import OF_EACH_RANK, SavedTensor

_log = logging.getLogger(__name__)
_NAMES = ("cpu", "device", "python", "gauss")
_NUMPY_NAMES = ("numpy", "numpy-gauss")
_NUMPY = "numpy.random"
_MERSENNE = "MT19937"
_WORDS = 624
"""The numbers in a state of the Mersenne twister, behind which is the index of the next one."""


def random_states(device: Device) -> dict[str, Tensor]:
    """Return the states of this rank, with that of ``numpy.random`` if the program has imported it.

    Python's and numpy's are 625 numbers each, and the second of a pair of Gaussian ones if the first has been given.
    """
    _, internal, gauss = random.getstate()
    states = {
        "cpu": torch.get_rng_state(),
        "device": device.rng_state(),
        "python": torch.tensor(internal),
        "gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if (numpy_random := _numpy_random()) is not None:
        _, words, index, has_gauss, gauss = numpy_random.get_state()
        states["numpy"] = torch.tensor([*words.tolist(), index])
        states["numpy-gauss"] = torch.tensor([gauss] if has_gauss else [], dtype=torch.float64)
    return {_name(rank_and_size()[0], name): value for name, value in states.items()}


def _numpy_random() -> ModuleType | None:
    """Return the module, None if it is not imported or draws from a generator that the user gave it."""
    module = sys.modules.get(_NUMPY)
    is_own = module is not None and module.get_bit_generator().state["bit_generator"] == _MERSENNE
    return module if is_own else None


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
        numpy_names = _NUMPY_NAMES if _name(rank, "numpy") in saved else ()  # not in earlier checkpoints
        return _setter_of_states({name: _read(saved, rank, name) for name in (*_NAMES, *numpy_names)}, rank, device)
    seed = int(_read(saved, 0, "python")[0]) * size + rank

    def start_anew() -> None:
        _log.warning(
            "the checkpoint is of %s, and this engine has %s: random generators start from new seeds", saved_of, now
        )
        torch.manual_seed(seed)
        random.seed(seed)
        if (numpy_random := _numpy_random()) is not None:
            numpy_random.seed(seed % 2**32)

    return start_anew


def _setter_of_states(states: Mapping[str, Tensor], rank: int, device: Device) -> Callable[[], None]:
    gauss = states["gauss"].tolist()
    python = (3, tuple(states["python"].tolist()), gauss[0] if gauss else None)
    try:
        random.Random().setstate(python)
        torch.Generator().set_state(states["cpu"])
        set_numpy = _setter_of_numpy(states) if "numpy" in states else lambda: None
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
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
        set_numpy()

    return set_states


def _setter_of_numpy(states: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a function that puts the state of ``numpy.random`` back, if this program has numpy."""
    with contextlib.suppress(ImportError):
        importlib.import_module(_NUMPY)
    if (numpy_random := _numpy_random()) is None:
        return lambda: None
    *words, index = states["numpy"].tolist()
    if len(words) != _WORDS or not 0 <= index <= _WORDS:  # numpy would read beyond its memory
        raise ValueError(f"{len(words)} numbers and index {index}, of numpy's {_WORDS}")
    gauss = states["numpy-gauss"].tolist()
    state = (_MERSENNE, words, index, len(gauss), gauss[0] if gauss else 0.0)
    numpy_random.RandomState().set_state(state)
    return lambda: numpy_random.set_state(state)


def _read(saved: Mapping[str, SavedTensor], rank: int, name: str) -> Tensor:
    if (found := saved.get(_name(rank, name))) is None:
        raise DamageError(_file(rank), f"it has no {_name(rank, name)}")
    return found.read()


def _name(rank: int, name: str) -> str:
    return f"{OF_EACH_RANK}{rank}-{name}"


def _file(rank: int) -> Path:
    return Path(f"rng-{rank}.safetensors")
