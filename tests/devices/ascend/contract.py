"""What wheels of torch_npu have of what rlcore uses (``uses.py``), read from them without running them.

python tests/devices/ascend/contract.py WHEEL...     writes contract.jsonl beside this file

Python by its syntax tree, operators by the schemas in libtorch_npu.so. Of what is written in C it is only told that the
library has its name. Wheels of one version for several machines must say the same, and share an entry.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.devices.ascend.uses import Use, uses

EXTRACT = Path(__file__).with_name("contract.jsonl")
_FILES = re.compile(
    r"torch_npu/(npu/\w+\.py|multiprocessing/reductions\.py|utils/storage\.py|__init__\.py|_init/registry/\w+\.py)"
)
_SCHEMA = re.compile(rb"((?:npu_[a-z0-9_]+|get_npu_format)\((?:Tensor|\w+)[^\x00\n]*?\) -> [^\x00\n]+)")
_OPERATORS = re.compile(
    r"get_npu_format|npu_(format_cast|rms_norm|swiglu|cross_entropy_loss|fusion_attention(_v3)?|fused_linear_online_max_sum"
    r"|fused_cross_entropy_loss_with_max_sum|rotary_mul)"
)
_IN_C = ("properties.", "torch_npu._C.")
"""What is no Python: its last name is looked for in the library."""
Names = dict[str, list[str]]
"""Name -> parameters, as "device=None", then "*", then those by name; "*x" and "**x" take any, "..." is not known."""


# ------------------------------------------------------------------------------------------------ what a wheel has


def extract(wheel: Path) -> dict[str, Any]:
    """ "npu.Stream": its parameters, "npu.Stream().query": those of a method, "ops.npu_swiglu": a schema."""
    with zipfile.ZipFile(wheel) as archive:
        trees = {name: ast.parse(archive.read(name)) for name in archive.namelist() if _FILES.fullmatch(name)}
        library = archive.read("torch_npu/lib/libtorch_npu.so")
    found = _module(trees) | _operators(library) | _in_c(library)
    found |= _defined(trees["torch_npu/utils/storage.py"], "storage")
    found |= _reductions(trees["torch_npu/multiprocessing/reductions.py"])
    found |= {"hccl": next(filter(None, map(_registered, trees.values())))}
    return {
        "version": wheel.name.split("-")[1],
        "wheels": {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest()},
        "names": {
            name: found[name] for name in sorted(found) if "._" not in name or name.startswith(("storage.", *_IN_C))
        },
    }


def together(extracts: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one version's wheels.

    Raises:
        ValueError: they differ.
    """
    first, *others = extracts
    for other in others:
        if (other["version"], other["names"]) != (first["version"], first["names"]):
            raise ValueError(f"{', '.join([*first['wheels'], *other['wheels']])} do not say the same")
    return first | {"wheels": {name: digest for one in extracts for name, digest in one["wheels"].items()}}


def _module(trees: dict[str, ast.Module]) -> Names:
    """Of ``torch.npu``: what its __init__ defines, and what it imports from the files beside it."""
    files = {name.split("/")[-1][:-3]: tree for name, tree in trees.items() if name.startswith("torch_npu/npu/")}
    defined = {file: _defined(tree, "npu") for file, tree in files.items()}
    found = dict(defined["__init__"])
    for node in files["__init__"].body:
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        beside = defined.get(getattr(node, "module", None) or "", {}) if getattr(node, "level", 0) else {}
        for alias in node.names:
            name = f"npu.{alias.asname or alias.name}"
            if alias.name == "*":
                found |= {key: value for key, value in beside.items() if key not in found}
            else:
                found.setdefault(name, ["..."])
                found |= {
                    key: value for key, value in beside.items() if re.fullmatch(rf"{re.escape(name)}(\b.*)?", key)
                }
    return found


def _defined(tree: ast.Module, prefix: str) -> Names:
    found: Names = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef():
                # torch_npu sets these on torch's class, under the rest of their name.
                is_set = node.name.startswith("_typed_storage_")
                name = node.name.removeprefix("_typed_storage")
                found[f"{prefix}.{name}"] = _parameters(node, skip=is_set and node.args.args[:1] != [])
            case ast.ClassDef():
                found |= _members(node, f"{prefix}.{node.name}")
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {f"{prefix}.{target.id}": ["..."] for target in targets if isinstance(target, ast.Name)}
    return found


def _members(node: ast.ClassDef, name: str) -> Names:
    found: Names = {name: ["..."]}
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            marks = {ast.unparse(item) for item in member.decorator_list}
            if member.name in ("__init__", "__new__"):
                found[name] = _parameters(member, skip=True)
            elif marks & {"staticmethod", "classmethod"}:
                found[f"{name}.{member.name}"] = _parameters(member, skip="classmethod" in marks)
            else:
                found[f"{name}().{member.name}"] = _parameters(member, skip=True)
    return found


def _parameters(function: ast.FunctionDef, *, skip: bool = False) -> list[str]:
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    names = [_parameter(*pair) for pair in zip(plain, defaults, strict=True)][int(skip) :]
    names += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    names += [_parameter(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _parameter(item: ast.arg, default: ast.expr | None) -> str:
    return item.arg if default is None else f"{item.arg}={ast.unparse(default)}"


def _reductions(tree: ast.Module) -> Names:
    """And what is sent for a tensor, in its order."""
    found = _defined(tree, "reductions")
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Attribute() as target], value=ast.Name(id=name)) if (
                ast.unparse(target) == "torch.multiprocessing.reductions.reduce_tensor"
            ):
                found["reductions.reduce_tensor"] = found[f"reductions.{name}"]
            case ast.Return(value=ast.Tuple(elts=[ast.Name(id="rebuild_npu_tensor"), ast.Tuple(elts=sent)])):
                found["reductions.reduce_tensor()"] = [ast.unparse(item) for item in sent]
    return found


def _registered(tree: ast.Module) -> list[str]:
    """How HCCL is made known to torch.distributed."""
    for node in ast.walk(tree):
        is_it = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Backend.register_backend")
        if is_it and ast.literal_eval(node.args[0]) == "hccl":
            return sorted(f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords)
    return []


def _operators(library: bytes) -> Names:
    found: Names = {}
    for schema in map(bytes.decode, _SCHEMA.findall(library)):
        name = schema.partition("(")[0]
        if _OPERATORS.fullmatch(name):
            found.setdefault(f"ops.{name}", [schema])
    return found


def _in_c(library: bytes) -> Names:
    asked = {use.name for use in uses() if use.name.startswith(_IN_C)}
    return {name: ["..."] for name in asked if b"\0%s\0" % name.rpartition(".")[2].encode() in library}


# ------------------------------------------------------------------------------------------------ both together


def missing(use: Use, names: Names) -> str:
    """What of the use the wheel does not have, or ""."""
    owner, _, member = use.name.rpartition(".")
    parameters = names.get(use.name, names.get(f"{owner}().{member}"))  # or a method, asked of its class
    if parameters is None:
        return f"{use.place}: {use.name} is absent"
    if not use.is_call or "..." in parameters:
        return ""
    wrong = _wrong_operator(use, parameters[0]) if use.name.startswith("ops.") else _wrong_call(use, parameters)
    return f"{use.place}: {use.name} {wrong}" if wrong else ""


def _wrong_call(use: Use, parameters: list[str]) -> str:
    """Of a function in Python."""
    plain = [name.partition("=")[0] for name in parameters]
    end = next((i for i, name in enumerate(plain) if name.startswith("*")), len(plain))
    positional, is_open = plain[:end], any(name.startswith("*") and name != "*" for name in plain)
    if len(use.arguments) > len(positional) and not is_open:
        return f"takes {len(positional)} by position, is given {len(use.arguments)}"
    given = {name for name, _ in use.keywords}
    if unknown := [name for name in given if name not in plain and not plain[-1:][0].startswith("**")]:
        return f"has no {', '.join(unknown)}"
    needed = [name for name in parameters if "=" not in name and not name.startswith("*")]
    lacking = [name for name in needed if name not in given and name not in positional[: len(use.arguments)]]
    return f"is not given {', '.join(lacking)}" if lacking else ""


def _wrong_operator(use: Use, schema: str) -> str:
    """By names, and by the types of what is written there as a literal."""
    arguments = torch._C.parse_schema(f"npu::{schema}").arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    if len(use.arguments) > len(positional):
        return f"takes {len(positional)} by position, is given {len(use.arguments)}"
    by_name = {argument.name: argument for argument in arguments}
    given = {argument.name: text for argument, text in zip(positional, use.arguments, strict=False)}
    if unknown := [name for name, _ in use.keywords if name not in by_name]:
        return f"has no {', '.join(unknown)}"
    given |= dict(use.keywords)
    if lacking := [
        name for name, argument in by_name.items() if name not in given and not argument.has_default_value()
    ]:
        return f"is not given {', '.join(lacking)}"
    for name, text in given.items():
        for value in _literals(ast.parse(text, mode="eval").body):
            if not _fits(value, str(by_name[name].type)):
                return f"takes {by_name[name].type} for {name}, is given {value!r}"
    return ""


def relied_on(use: Use, names: Names) -> dict[str, str]:
    """What an operator takes for the arguments that it is not given."""
    arguments = torch._C.parse_schema(f"npu::{names[use.name][0]}").arguments
    given = {argument.name for argument in arguments[: len(use.arguments)]} | {name for name, _ in use.keywords}
    return {
        argument.name: f"{argument.type} = {argument.default_value}"
        for argument in arguments
        if argument.name not in given
    }


def _literals(node: ast.expr) -> Iterator[Any]:
    """Values that are written there, in either branch."""
    if isinstance(node, ast.IfExp):
        yield from (*_literals(node.body), *_literals(node.orelse))
    try:
        yield ast.literal_eval(node)
    except ValueError:
        return


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return kind.startswith("Optional[")
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    if isinstance(value, tuple | list):
        return kind.startswith("List[")
    takes = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "number": (int, float)}
    return type(value) in takes.get(kind, ())


def main(wheels: list[Path]) -> None:
    found = [extract(wheel) for wheel in wheels]
    versions = dict.fromkeys(one["version"] for one in found)
    entries = [together([one for one in found if one["version"] == version]) for version in versions]
    EXTRACT.write_text("\n".join(map(json.dumps, entries)) + "\n")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
