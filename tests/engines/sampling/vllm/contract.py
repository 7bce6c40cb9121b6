"""The uses of vLLM, collected from rlcore's code, and those that a vLLM wheel has, read without running it.

``python -m tests.engines.sampling.vllm.contract WHEEL...`` writes ``contract.json`` beside this file, from one wheel
a version.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.engines.sampling.vllm.typed_uses import Interface, Scope, asked, interfaces, returned, typed_uses

ROOT = Path(__file__).resolve().parents[4]
OURS = ROOT / "engines" / "sampling" / "vllm"
RECORD = Path(__file__).with_name("contract.json")
ARGUMENTS, SAMPLING = "vllm.engine.arg_utils.EngineArgs", "vllm.sampling_params.SamplingParams"
TRANSFER = "vllm.distributed.weight_transfer.base.WeightTransferEngine"

_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

Uses = dict[str, set[str]]
"""Dotted name of a module member -> members of it, "method(parameter)" for a parameter that is given by name, and
"method(#2)" where two are given by position."""


# ------------------------------------------------------------------------------------------------- what we use


@functools.cache
def uses() -> Uses:
    found: Uses = {}
    for path in sorted(OURS.glob("*.py")):
        for name, members in uses_in(path.read_text()).items():
            found.setdefault(name, set()).update(members)
    found[ARGUMENTS] |= keys(OURS / "arguments.py", "engine_arguments")
    found[SAMPLING] |= _keywords(OURS / "replica.py", "sampling_params") - {"is_streamed"}
    found[TRANSFER] |= {name for name in transfer_members() if not name.startswith("_")} - {"trainer_send_weights"}
    return found


def uses_in(code: str) -> Uses:
    """Return the uses of one file: its imports, and the members of vLLM's objects that it reads."""
    tree, (known, functions) = ast.parse(code), _types()
    found = dict(imported(tree, "vllm"))
    for interface, member in typed_uses(tree, known, functions):
        for name in known[interface].classes:
            found.setdefault(name, set()).add(member)
    # What its plugins have is held by their own contracts.
    return {name: members for name, members in found.items() if name.startswith("vllm.")}


@functools.cache
def _types() -> tuple[dict[str, Interface], Scope]:
    known = interfaces(OURS / "interfaces.py")
    return known, returned((ast.parse(path.read_text()) for path in OURS.glob("*.py")), known)


def transfer_members() -> set[str]:
    """Return the members that our class of that base defines or uses of itself."""
    (ours,) = (node for node in ast.parse((OURS / "transfer.py").read_text()).body if _derives(node, "weight_transfer"))
    used = {
        node.attr for node in ast.walk(ours) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    return _names_set(ours.body) | used


def _derives(node: ast.stmt, base: str) -> bool:
    return isinstance(node, ast.ClassDef) and any(base in ast.unparse(one) for one in node.bases)


def imported(tree: ast.Module, package: str) -> Iterator[tuple[str, set[str]]]:
    """Names imported from a package, with the attributes and keywords that are used of them."""
    named: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            named |= {alias.asname or alias.name: [f"{node.module}.{alias.name}"] for alias in node.names}
        elif isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name.startswith(f"{package}.")]
            named |= {alias.asname: [alias.name] for alias in aliases if alias.asname}
    members: Uses = {name: set() for names in named.values() for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            named[ast.unparse(node.target)] = [
                one for each in node.iter.elts for one in named.get(ast.unparse(each), ())
            ]
    asked_for = asked(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            for owner in named.get(ast.unparse(node.value), ()):
                members[owner].add(f"{node.attr}?" if node.attr in asked_for else node.attr)
        if isinstance(node, ast.Call):
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            for owner in named.get(ast.unparse(node.func), ()):
                is_class = owner.rpartition(".")[2][0].isupper()  # whose fields are given
                members[owner] |= given if is_class else {f"({name})" for name in given}
            if isinstance(node.func, ast.Attribute):
                for owner in named.get(ast.unparse(node.func.value), ()):
                    members[owner] |= {f"{node.func.attr}({name})" for name in given}
    yield from members.items()


def keys(path: Path, function: str) -> set[str]:
    """The keys of dictionaries that a function writes out, and those that it sets."""
    (body,) = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == function)
    return {
        key.value
        for node in ast.walk(body)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    } | {
        node.slice.value
        for node in ast.walk(body)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }


def _keywords(path: Path, function: str) -> set[str]:
    """Keyword arguments of the calls of a function."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {
        keyword.arg
        for call in calls
        if ast.unparse(call.func).rpartition(".")[2] == function
        for keyword in call.keywords
        if keyword.arg
    }


# ---------------------------------------------------------------------------------------------- what a wheel has


class Wheel:
    """Modules of vLLM, read as source."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self._trees: dict[str, ast.Module | None] = {}

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = module.replace(".", "/")
            source = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
            self._trees[module] = None if source is None else ast.parse(source)
        return self._trees[module]

    def abstract(self, name: str) -> list[str]:
        """Methods that a class leaves to those that derive from it."""
        module, _, last = name.rpartition(".")
        tree = self._tree(module)
        (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == last) if tree else ()
        return [
            node.name
            for node in found.body
            if isinstance(node, ast.FunctionDef) and "abstractmethod" in map(ast.unparse, node.decorator_list)
        ]

    def members(self, name: str) -> set[str] | None:
        """Return the members of a class, function or module; None if there is no such name."""
        if (tree := self._tree(name)) is not None:
            return _names_set(tree.body)
        module, _, last = name.rpartition(".")
        tree = self._tree(module)
        if tree is None:
            return None
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == last:
                return self._class_members(module, node)
            if isinstance(node, _FUNCTION) and node.name == last:
                return {f"({one})" for one in _parameters(node)}
        if source := _origin(tree, last, module):
            return self.members(source)
        return set() if last in _names_set(tree.body) else None

    def _class_members(self, module: str, node: ast.ClassDef) -> set[str]:
        found = _names_set(node.body)
        for item in ast.walk(node):
            if isinstance(item, _FUNCTION):
                found |= {f"{item.name}({one})" for one in _parameters(item)}
                by_position = len([*item.args.posonlyargs, *item.args.args]) - 1
                found |= {f"{item.name}(#{number + 1})" for number in range(by_position)}
            targets = (
                item.targets
                if isinstance(item, ast.Assign)
                else [item.target]
                if isinstance(item, ast.AnnAssign)
                else []
            )
            for target in targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                        found.add(one.attr)
        tree = self._tree(module)
        for base in node.bases:
            own = f"{module}.{ast.unparse(base)}"
            source = tree and _origin(tree, ast.unparse(base), module)
            found |= self.members(source or own) or set()
        return found


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = node.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _names_set(body: list[ast.stmt]) -> set[str]:
    """Defined by these statements."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef | _FUNCTION):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.If | ast.Try):
            found |= _names_set([*node.body, *node.orelse])
    return found


def _origin(tree: ast.Module, name: str, module: str) -> str | None:
    """The dotted name of what a module imports as ``name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package = [*module.split(".")[: -node.level], ""] if node.level else [""]
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return f"{'.'.join(package)}{node.module}.{alias.name}"
    return None


def lacking(used: Uses, members: Callable[[str], set[str] | None]) -> list[str]:
    """Return the uses that are absent; a member that the code looks for with ``hasattr`` may be."""
    found = []
    for name, wanted in sorted(used.items()):
        has = members(name)
        if has is None:
            found.append(name)
        else:
            found += [f"{name}: {one}" for one in sorted(wanted - has) if not one.endswith("?")]
    return found


def present(wanted: set[str], has: set[str]) -> list[str]:
    return sorted(one for one in wanted if one.removesuffix("?") in has)


def extract(path: Path) -> dict[str, Any]:
    """Return the uses that a wheel has."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        wheel = Wheel(lambda name: archive.read(name).decode() if name in names else None)
        used = uses()
        has = {name: wheel.members(name) for name in used}
        abstract = wheel.abstract(TRANSFER)
    return {
        "wheel": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "abstract": {TRANSFER: abstract},
        "names": {name: present(used[name], found) for name, found in sorted(has.items()) if found is not None},
    }


if __name__ == "__main__":
    record = {wheel["wheel"].split("-")[1]: wheel for wheel in map(extract, map(Path, sys.argv[1:]))}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
