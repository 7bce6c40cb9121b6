"""Records what rlcore asks of torch_npu while it runs, as "npu.Event().ipc_handle devices/ascend/streams.py:49".

Where ``CANN_SIM_RECORD`` names a file, all processes of the run add to it. torch_npu itself is not changed in what it
does: its modules and classes only tell which of their attributes are looked up, and from which file.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

_MODULES = {
    "torch_npu.npu": "npu",
    "torch_npu._C": "torch_npu._C",
    "torch_npu.multiprocessing.reductions": "reductions",
    "torch.multiprocessing.reductions": "reductions",
}
_CLASSES = ("Event", "Stream", "MemPool")
_BY_TORCH = ("_lazy_init",)
"""What torch itself, which is C++, asks for from within a line of rlcore's."""


def begin(record: Path) -> None:
    """Before rlcore is imported."""
    import torch

    note = _Notes(record)
    for module, name in _MODULES.items():
        _watch_module(importlib.import_module(module), name, note)
    _watch_module(torch.ops.npu, "ops", note)
    for name in _CLASSES:
        _watch_objects(getattr(sys.modules["torch_npu.npu"], name), f"npu.{name}()", note)


class _Notes:
    def __init__(self, record: Path) -> None:
        spec = importlib.util.find_spec("rlcore")
        assert spec is not None and spec.origin is not None
        self._root = str(Path(spec.origin).parent)
        self._record = record
        self._known: set[str] = set()

    def __call__(self, owner: str, name: str) -> None:
        frame = sys._getframe(2)
        file = frame.f_code.co_filename
        if name.startswith("__") or name in _BY_TORCH or not file.startswith(self._root):
            return
        line = f"{owner}.{name} {file.removeprefix(self._root + '/')}:{frame.f_lineno}\n"
        if line not in self._known:
            self._known.add(line)
            with self._record.open("a") as log:
                log.write(line)


def _watch_module(module: Any, owner: str, note: _Notes) -> None:
    kind = type(module)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            note(owner, name)
            return super().__getattribute__(name)

    module.__class__ = Watched


def _watch_objects(kind: Any, owner: str, note: _Notes) -> None:
    def told(self: Any, name: str) -> Any:
        note(owner, name)
        return object.__getattribute__(self, name)

    kind.__getattribute__ = told
