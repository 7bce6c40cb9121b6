"""Tensors that the modules of an engine's model keep beside their parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from rlcore.device import Device


def strays(model: nn.Module, device: Device) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on the device that are neither parameters nor buffers, by their attributes' names.

    An example is what MLA derives from its weights after loading: only loading makes them right.
    """
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, Tensor) and id(tensor) not in known and tensor.device == device.torch_device:
                    yield (f"{prefix}.{name}" if prefix else name), tensor
