"""The functions that ``graph_break`` keeps out of graphs. Importing this file loads torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlcore.kernels.autograd.compiled import GRAPH_BREAKS

UNCOMPILED: dict[str, Callable[..., Any]] = {
    reason: torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    for reason, function in GRAPH_BREAKS.items()
}
"""By reason. It is complete: what is decorated once the compiler is loaded is not in ``GRAPH_BREAKS``."""
