"""What rlcore uses of vllm-ascend and of the vLLM beside it, and what their wheels have, read without running them.

python -m tests.devices.ascend.vllm_contract VLLM_WHEEL VLLM_ASCEND_WHEEL ...     writes vllm_contract.json

The uses are those that ``tests/engines/sampling/vllm/contract.py`` collects of vLLM, and what ``ascend.py`` puts in
the place of some: the worker, the runners, the allocator.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

from tests.engines.sampling.vllm import contract as vllm
from tests.engines.sampling.vllm.typed_uses import interfaces

RECORD = Path(__file__).with_name("vllm_contract.json")
ASCEND = vllm.OURS / "ascend.py"
IN_PLACE_OF = {
    "vllm.v1.worker.gpu_worker.Worker": "vllm_ascend.worker.worker.NPUWorker",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "vllm_ascend.worker.model_runner_v1.NPUModelRunner",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "vllm_ascend.worker.v2.model_runner.NPUModelRunner",
}
"""vLLM's classes, and those that its plugin has instead: rlcore asks the same of both."""
NOT_ON_NPUS = (
    "vllm.device_allocator.cumem.",
    "vllm.device_allocator.AllocationData",
    "vllm._custom_ops",
    "vllm.distributed.weight_transfer.",
)
"""Of vLLM's own allocator, of its build for the CPU, and of its weight transfer, which the executor does not use."""


def uses() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, members in vllm.uses().items():
        if not name.startswith(NOT_ON_NPUS):
            found[name] = set(members)
            if name in IN_PLACE_OF:
                found[IN_PLACE_OF[name]] = set(members)
    return found | own_uses()


def own_uses() -> dict[str, set[str]]:
    """What ``ascend.py`` takes from vllm_ascend: imports, what it asks of them, and its protocols."""
    tree = ast.parse(ASCEND.read_text())
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_ascend"):
            for alias in node.names:
                asked = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
                members = {n.attr for n in asked if ast.unparse(n.value) == alias.name}
                found.setdefault(f"{node.module}.{alias.name}", set()).update(members)
    for interface in interfaces(ASCEND).values():
        for name in interface.classes:
            found.setdefault(name, set()).update(interface.members)
    return found


def switches(source: str) -> set[str]:
    """The environment variables that vllm_ascend's envs.py knows."""
    return {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)} & {_switch()}


def _switch() -> str:
    (found,) = (
        node.value.value
        for node in ast.parse(ASCEND.read_text()).body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "_FORMAT_SWITCH"
        and isinstance(node.value, ast.Constant)
    )
    return str(found)


def extract(vllm_wheel: Path, plugin_wheel: Path) -> dict[str, Any]:
    """Of the uses, those that the two wheels have together."""
    with zipfile.ZipFile(vllm_wheel) as theirs, zipfile.ZipFile(plugin_wheel) as plugin:
        archives = {name: archive for archive in (theirs, plugin) for name in archive.namelist()}
        wheel = vllm.Wheel(lambda name: archives[name].read(name).decode() if name in archives else None)
        used = uses()
        has = {name: wheel.members(name) for name in used}
        known = switches(plugin.read("vllm_ascend/envs.py").decode())
    return {
        "wheels": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (vllm_wheel, plugin_wheel)},
        "switches": sorted(known),
        "names": {name: vllm.present(used[name], found) for name, found in sorted(has.items()) if found is not None},
    }


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    found = [extract(*pair) for pair in zip(paths[::2], paths[1::2], strict=True)]
    RECORD.write_text(json.dumps({list(one["wheels"])[1].split("-")[1]: one for one in found}, indent=1) + "\n")
