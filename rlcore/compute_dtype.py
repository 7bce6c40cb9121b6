"""Mixed precision on one device: parameters are stored in one dtype and read in another while the module computes.

FSDP does this for sharded modules; on one device its shards would only be copies. While the module computes, an
attribute access such as ``module.weight`` returns the parameter cast to the compute dtype, and the gradient flows back
through the cast. ``parameters()`` always returns the stored tensors. Nothing is wrapped and no name changes. The casts
are not kept for the backward pass, which makes them again: by the graph of a compiled block, by hooks elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn

from rlcore._torch_private import call_after_backward, own_parameters, storage_key, tree_map_only
from rlcore.errors import StateError

_ATTRIBUTE = "_rlcore_compute_dtype"


class ComputeDtype:
    """The state that all modules of one tree share: the compute dtype, and whether the tree computes now."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.is_computing = False
        self._casts: dict[int, tuple[Tensor, Tensor]] | None = None

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)(self.dtype)  # the copy computes nothing yet, so that its parameters can be changed

    def read(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or not self.is_computing or parameter.dtype == self.dtype:
            return parameter
        cast = parameter.to(self.dtype)
        if self._casts is not None:
            self._casts[storage_key(cast.untyped_storage())] = cast, parameter.detach()
        return cast

    def of_inputs(self, values: Any) -> Any:
        """Return ``values`` with every floating-point tensor cast, as FSDP casts the inputs of its modules."""
        return tree_map_only(Tensor, self._of_input, values)

    def _of_input(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def through_backward(self, result: Tensor) -> Tensor:
        """Compute during the backward pass of ``result`` too, and stop at the end of that pass."""
        if result.requires_grad:
            result.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        return result

    def _begin_backward(self, gradient: Tensor) -> None:
        self.is_computing = True
        call_after_backward(self.stop)

    def stop(self) -> None:
        self.is_computing = False

    @contextmanager
    def again(self) -> Iterator[None]:
        """Compute inside this context, which may be a recomputation in the backward pass."""
        before, self.is_computing = self.is_computing, True
        try:
            yield
        finally:
            self.is_computing = before

    @contextmanager
    def keeping_no_casts(self) -> Iterator[None]:
        """Compute inside this context; for the backward pass autograd saves the parameters instead of their casts."""
        before, self._casts = self._casts, {}
        try:
            with self.again(), torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked):
                yield
        finally:
            self._casts = before

    def _packed(self, tensor: Tensor) -> Any:
        # All casts live until the block ends, so a key identifies one of them; on the meta device no address does.
        found = (self._casts or {}).get(storage_key(tensor.untyped_storage()))
        if found is None:
            return tensor
        return found[1], tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpacked(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        parameter, *layout = packed
        if parameter.untyped_storage().nbytes() == 0 < parameter.nbytes:  # reading it would be a segmentation fault
            raise StateError("this backward needs weights that are away; bring them back first: onload('weights')")
        return parameter.to(self.dtype).as_strided(*layout)  # type: ignore[no-any-return]


def set_compute_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Let all parameters of another dtype be read in ``dtype``; the wrappers below say when the module computes."""
    found = ComputeDtype(dtype)
    for part in module.modules():
        names = tuple(name for name, held in own_parameters(part).items() if held is not None and held.dtype != dtype)
        if names:
            part.__class__ = _reading(type(part), names)  # type: ignore[arg-type]  # mypy: a class is hashable
        setattr(part, _ATTRIBUTE, found)


@functools.cache  # the compiler takes modules of one class for alike
def _reading(cls: type[nn.Module], names: tuple[str, ...]) -> Any:
    """Return a subclass of ``cls`` whose named parameters are read in the compute dtype."""
    body: dict[str, Any] = {name: _property(name) for name in names}
    return type(cls.__name__, (cls,), body | {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _property(name: str) -> property:
    def read(module: Any) -> Any:
        if name in (held := own_parameters(module)):
            return module._rlcore_compute_dtype.read(held[name])
        if name in vars(module):
            return vars(module)[name]
        raise AttributeError(name)  # Module.__getattr__ comes next: buffers, submodules, its own error

    def write(module: Any, value: Any) -> None:
        vars(module)[name] = value  # not a parameter: a plain tensor in the place of a deleted one

    def delete(module: Any) -> None:
        vars(module).pop(name)

    return property(read, write, delete)


def replace_method(module: nn.Module, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of one module in place; a wrapper module would change the names of the parameters.

    Args:
        wrapped: takes the function, whose first argument is the module, and returns the function to call instead. A
            deep copy of the module therefore calls the replacement with itself.
    """
    method = getattr(module, name)
    if getattr(method, "__self__", None) is module:
        function = method.__func__
    else:  # somebody has put it there

        @functools.wraps(method)
        def function(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

    if (new := wrapped(function)) is not function:
        setattr(module, name, MethodType(new, module))


def computing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the root. The tree computes from the call on, because a head may run after it.

    It stops at the end of the backward pass of the result. Where that pass fails or never runs, the caller calls
    ``stop_computing``.
    """

    @functools.wraps(call)
    def compute(module: Any, *args: Any, **kwargs: Any) -> Any:
        of: ComputeDtype = module._rlcore_compute_dtype
        before, of.is_computing = of.is_computing, True
        try:
            result = call(module, *of.of_inputs(args), **of.of_inputs(kwargs))
        except BaseException:
            of.is_computing = before
            raise
        return tree_map_only(Tensor, of.through_backward, result)

    return compute


def computing_inside(
    call: Callable[..., Any], surroundings: Callable[[ComputeDtype], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Wrap the forward of a block: it is called inside ``surroundings``, and its inputs are cast."""

    @functools.wraps(call)
    def compute(module: Any, *args: Any, **kwargs: Any) -> Any:
        of: ComputeDtype = module._rlcore_compute_dtype
        args, kwargs = of.of_inputs((args, kwargs))
        with surroundings(of):
            return call(module, *args, **kwargs)

    return compute


def computing_outside(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a compiled block: it computes even if its root does not. Its graph does not see this."""

    @functools.wraps(call)
    def compute(module: Any, *args: Any, **kwargs: Any) -> Any:
        of: ComputeDtype = module._rlcore_compute_dtype
        if of.is_computing:
            return call(module, *args, **kwargs)
        with of.again():
            result = call(module, *args, **kwargs)
        return tree_map_only(Tensor, of.through_backward, result)

    return compute


def stop_computing(module: nn.Module) -> None:
    """End the computation: from now on reading a parameter returns the stored tensor."""
    found = vars(module).get(_ATTRIBUTE)
    if found is not None:
        found.stop()


@contextmanager
def as_stored(module: nn.Module) -> Iterator[None]:
    """Inside this context reading a parameter returns the stored tensor, also while the module computes."""
    found = vars(module).get(_ATTRIBUTE)
    before = found is not None and found.is_computing
    stop_computing(module)
    try:
        yield
    finally:
        if found is not None:
            found.is_computing = before


def compute_dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype in which a parameter is read; while the module computes it differs from ``parameters()``."""
    found = vars(module).get(_ATTRIBUTE)
    return found.dtype if found is not None and found.is_computing else next(module.parameters()).dtype
