"""Checks of whole weights before they overwrite those of a module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.weights.names import mismatch
from rlcore.weights.view import WeightView


def check_state(
    module_name: str, own: Mapping[str, WeightView], state: Mapping[str, Tensor], *, is_adapters: bool
) -> None:
    """Refuse a state that ``load_state_dict()`` of a train engine cannot take.

    Args:
        own: the weights of the module, by name.
        is_adapters: they are those of its adapters alone.

    Raises:
        InvalidInputError: names, shapes or kinds of dtypes differ, or a value is NaN.
        UnsupportedError: a weight is no view of parameters.
    """
    if found := mismatch({name: weight.view for name, weight in own.items()}, state):
        call = "state_dict(adapters='only')" if is_adapters else "state_dict()"
        raise InvalidInputError(f"load_state_dict() needs exactly what {call} gives: {found}")
    for name, weight in own.items():
        if state[name].is_floating_point() != weight.view.is_floating_point():
            raise InvalidInputError(
                f"load_state_dict() does not round {name} from {state[name].dtype} to {weight.view.dtype}; "
                "convert it first"
            )
        if _has_nan(state[name]):
            raise InvalidInputError(
                f"load_state_dict() got NaN in {name}; give weights that are numbers, and nothing is changed"
            )
    if computed := [name for name, weight in own.items() if not weight.parts]:
        raise UnsupportedError(f"load_state_dict() of {module_name}", f"{computed[0]} is no view of a parameter")


def _has_nan(tensor: Tensor) -> bool:
    numbers = tensor.float() if tensor.element_size() == 1 else tensor  # torch has no isnan for some float8
    return bool(numbers.isnan().any())
