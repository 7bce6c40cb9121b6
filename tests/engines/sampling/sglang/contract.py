"""The uses of SGLang, collected from rlcore's code, and those that an SGLang wheel has, read without running it.

``python -m tests.engines.sampling.sglang.contract WHEEL...`` writes ``contract.json`` beside this file, from one wheel
a version.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.engines.sampling.vllm.contract import Uses, Wheel, imported, keys, lacking, present
from tests.engines.sampling.vllm.typed_uses import interfaces, returned, typed_uses

ROOT = Path(__file__).resolve().parents[4]
OURS = ROOT / "engines" / "sampling" / "sglang"
RECORD = Path(__file__).with_name("contract.json")
ARGUMENTS, SAMPLING = "sglang.srt.server_args.ServerArgs", "sglang.srt.sampling.sampling_params.SamplingParams"
_FIELDS = "sglang/srt/arg_groups/fields/"

__all__ = ["lacking"]


@functools.cache
def uses() -> Uses:
    found: Uses = {}
    for path in sorted(OURS.glob("*.py")):
        for name, members in uses_in(path.read_text()).items():
            found.setdefault(name, set()).update(members)
    found[ARGUMENTS] = keys(OURS / "arguments.py", "engine_arguments")
    found[SAMPLING] = keys(OURS / "sampling.py", "request_params")
    return found


def uses_in(code: str) -> Uses:
    """Return the uses of one file: its imports, and the members of SGLang's objects that it reads."""
    known = interfaces(OURS / "interfaces.py")
    functions = returned((ast.parse(path.read_text()) for path in OURS.glob("*.py")), known)
    tree = ast.parse(code)
    found = dict(imported(tree, "sglang"))
    for interface, member in typed_uses(tree, known, functions):
        for name in known[interface].classes:
            found.setdefault(name, set()).add(member)
    return {name: members for name, members in found.items() if name.startswith("sglang.")}


class SglangWheel(Wheel):
    """Modules of SGLang. Later versions keep the arguments of an engine in files of their own.

    Args:
        paths: of all files.
    """

    def __init__(self, read: Callable[[str], str | None], paths: Iterable[str]) -> None:
        super().__init__(read)
        self._groups = [
            path.removesuffix(".py").replace("/", ".")
            for path in paths
            if path.startswith(_FIELDS) and path.endswith(".py")
        ]

    def members(self, name: str) -> set[str] | None:
        found = super().members(name)
        if name != ARGUMENTS or found is None:
            return found
        for module in self._groups:
            for member in super().members(module) or ():
                found = found | (super().members(f"{module}.{member}") or set())
        return found


def extract(path: Path) -> dict[str, Any]:
    """Return the uses that a wheel has."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        wheel = SglangWheel(lambda name: archive.read(name).decode() if name in names else None, names)
        used = uses()
        has = {name: wheel.members(name) for name in used}
    return {
        "wheel": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "names": {name: present(used[name], found) for name, found in sorted(has.items()) if found is not None},
    }


if __name__ == "__main__":
    record = {wheel["wheel"].split("-")[1]: wheel for wheel in map(extract, map(Path, sys.argv[1:]))}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
