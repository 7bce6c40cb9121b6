"""What rlcore uses of torch_npu, read from its own code, and what wheels of torch_npu have, read from theirs.

python tests/devices/ascend/contract.py WHEEL...     writes contract.jsonl beside this file

Nothing is imported: Python by its syntax tree, operators by the schemas in libtorch_npu.so.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
EXTRACT = Path(__file__).with_name("contract.jsonl")
_FILES = re.compile(r"torch_npu/(npu/[a-z_]+\.py|multiprocessing/reductions\.py|utils/storage\.py)")
_SCHEMA = re.compile(rb"(npu_[a-z0-9_]+|get_npu_format)\(((?:Tensor|\w+)[^\x00\n]*?)\) -> [^\x00\n]+")
_OPERATORS = re.compile(
    r"get_npu_format|npu_(format_cast|rms_norm|swiglu|cross_entropy_loss|fusion_attention(_v3)?|fused_linear_online_max_sum"
    r"|fused_cross_entropy_loss_with_max_sum|rotary_mul)"
)


@dataclass(frozen=True, slots=True)
class Use:
    """One place where rlcore names something of torch_npu's."""

    name: str
    """Such as "npu.memory_allocated", "npu.Event.from_ipc_handle", "ops.get_npu_format", "storage._share_npu_"."""
    num_positional: int = 0
    keywords: tuple[str, ...] = ()
    is_call: bool = False
    is_optional: bool = False
    """Asked for by hasattr or getattr: it may be absent."""
    place: str = ""


# ------------------------------------------------------------------------------------------------ what rlcore uses


def uses(root: Path = ROOT) -> list[Use]:
    """Of all files of the plugin."""
    return [use for path in sorted((root / "devices" / "ascend").glob("*.py")) for use in uses_in(path)]


def uses_in(path: Path) -> Iterator[Use]:
    tree = ast.parse(path.read_text())
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        place = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and id(node) not in inner and (name := _name(node)):
            call = calls.get(id(node))
            keywords = tuple(keyword.arg or "**" for keyword in call.keywords) if call else ()
            yield Use(name, len(call.args) if call else 0, keywords, call is not None, False, place)
        elif isinstance(node, ast.Call) and _is_hasattr(node):
            asked = ast.Attribute(node.args[0], node.args[1].value)  # type: ignore[attr-defined]
            if name := _name(asked):
                yield Use(name, is_optional=True, place=place)


def _is_hasattr(node: ast.Call) -> bool:
    is_name = isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr")
    return is_name and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)


_OWNERS = {"npu()": "npu", "torch.ops.npu": "ops", "torch.TypedStorage": "storage", "_reductions()": "reductions"}


def _name(node: ast.AST) -> str:
    """The name under ``_OWNERS``, or ""."""
    text = ast.unparse(node)
    for owner, short in _OWNERS.items():
        if text.startswith(f"{owner}.") and "(" not in (rest := text[len(owner) + 1 :]):
            return f"{short}.{rest}"
    return ""


# ------------------------------------------------------------------------------------------------ what a wheel has


def extract(wheel: Path) -> dict[str, Any]:
    """Names with their parameters: {"npu.Stream": [...], "npu.Stream.query": [...], "ops.npu_swiglu": [...]}."""
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if _FILES.fullmatch(name):
                found |= _names_in(ast.parse(archive.read(name)), name)
        found |= _operators(archive.read("torch_npu/lib/libtorch_npu.so"))
    return {
        "wheel": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "names": {name: found[name] for name in sorted(found) if "._" not in name or name.startswith("storage.")},
    }


def _names_in(tree: ast.Module, file: str) -> dict[str, list[str]]:
    prefix = {"multiprocessing": "reductions", "utils": "storage"}.get(file.split("/")[1], "npu")
    found: dict[str, list[str]] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef():
                # torch_npu sets these on torch's class, under the rest of their name.
                is_set = node.name.startswith("_typed_storage_")
                name = node.name.removeprefix("_typed_storage")
                found[f"{prefix}.{name}"] = _parameters(node, skip=is_set and node.args.args[:1] != [])
            case ast.ClassDef():
                found[f"{prefix}.{node.name}"] = ["..."]
                for member in node.body:
                    if isinstance(member, ast.FunctionDef):
                        is_making = member.name in ("__init__", "__new__")
                        key = f"{prefix}.{node.name}" + ("" if is_making else f".{member.name}")
                        found[key] = _parameters(member, skip=not _is_static(member))
            case ast.ImportFrom() | ast.Import() if file == "torch_npu/npu/__init__.py":
                for alias in node.names:
                    found.setdefault(f"npu.{alias.asname or alias.name}", ["..."])
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(f"{prefix}.{target.id}", ["..."])
    return found


def _is_static(function: ast.FunctionDef) -> bool:
    return any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in function.decorator_list)


def _parameters(function: ast.FunctionDef, *, skip: bool = False) -> list[str]:
    """As they may be given by position, then "*", then those by name; "*x" and "**x" take any."""
    given = function.args
    names = [item.arg for item in [*given.posonlyargs, *given.args]][int(skip) :]
    names += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    names += [item.arg for item in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _operators(library: bytes) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, arguments in _SCHEMA.findall(library):
        if _OPERATORS.fullmatch(name.decode()):
            parts = re.split(r", (?![^\[(]*[\])])", arguments.decode())
            names = [re.sub(r"=.*", "", part).split()[-1] for part in parts]
            found.setdefault(f"ops.{name.decode()}", names)
    return found


# ------------------------------------------------------------------------------------------------ both together


def missing(use: Use, names: dict[str, list[str]]) -> str:
    """What of the use the wheel does not have, or ""."""
    if use.name not in names:
        return f"{use.place}: {use.name} is absent"
    parameters = names[use.name]
    if not use.is_call or "..." in parameters:
        return ""
    positional = parameters[: next((i for i, name in enumerate(parameters) if name.startswith("*")), len(parameters))]
    takes_any = any(name.startswith("*") and name != "*" for name in parameters)
    if use.num_positional > len(positional) and not takes_any:
        return f"{use.place}: {use.name} takes {len(positional)} by position, is given {use.num_positional}"
    unknown = [name for name in use.keywords if name not in parameters and not parameters[-1:][0].startswith("**")]
    return f"{use.place}: {use.name} has no {', '.join(unknown)}" if unknown else ""


_KINDS = {
    "npu": "names of `torch.npu`",
    "ops": "operators, by schema",
    "storage": "methods of storages",
    "reductions": "reductions of tensors",
}


def table(wheels: dict[str, dict[str, Any]]) -> str:
    """Markdown: of what rlcore uses, how much each wheel has."""
    lines = ["| rlcore uses | " + " | ".join(wheels) + " |", "| --- |" + " --- |" * len(wheels)]
    for kind, title in _KINDS.items():
        mine = {use.name: use for use in uses() if use.name.partition(".")[0] == kind}
        cells = []
        for wheel in wheels.values():
            absent = sorted(name for name, use in mine.items() if missing(use, wheel["names"]))
            without = f", not {', '.join(f'`{name}`' for name in absent)}" if absent else ""
            cells.append(f"{len(mine) - len(absent)}{without}")
        lines.append(f"| {len(mine)} {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    EXTRACT.write_text("\n".join(json.dumps(extract(Path(wheel))) for wheel in sys.argv[1:]) + "\n")
