"""A module in evaluation mode for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in evaluation mode; afterwards each submodule is as it was."""
    were_training = [submodule for submodule in module.modules() if submodule.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in were_training:
            submodule.training = True
