"""The members of another project's objects that rlcore uses, found in its code by the types that it gives them.

``engines/sampling/vllm/interfaces.py`` names the types, and the vLLM classes that each stands for; that of SGLang does
likewise. Where a name is annotated with one, or holds what a member of one is annotated with, each attribute that is
asked of it is a use: also one that ``interfaces.py`` does not have.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Scope = dict[str, str]
"""Name, or ``self.name`` -> interface."""
_OF_CONTAINERS = {*dir(dict), *dir(list)}


@dataclass
class Interface:
    classes: list[str]
    """Dotted names of the project's."""
    members: dict[str, ast.expr | None] = field(default_factory=dict)
    """-> the annotation of the attribute, or of what the method returns."""


def interfaces(path: Path) -> dict[str, Interface]:
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases):
            interface = found[node.name] = Interface((ast.get_docstring(node) or "").split())
            for item in node.body:
                if isinstance(item, ast.AnnAssign):
                    interface.members[ast.unparse(item.target)] = item.annotation
                elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                    interface.members[item.name] = item.returns
    return found


def returned(trees: Iterable[ast.Module], known: dict[str, Interface]) -> Scope:
    """Return the functions that are annotated to return an interface."""
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: kind for node in functions if (kind := _named(node.returns, known))}


def typed_uses(tree: ast.Module, known: dict[str, Interface], functions: Scope) -> Iterator[tuple[str, str]]:
    """(interface, member), (interface, "method(parameter)"), (interface, "method(#2)") for two given by position.

    "member?" is one that the code asks for with ``hasattr`` first.
    """
    for owner in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        own = {
            f"self.{ast.unparse(node.target)}": kind
            for node in owner.body
            if isinstance(node, ast.AnnAssign) and (kind := _named(node.annotation, known))
        }
        bodies = [node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for body in [*bodies, *bodies]:  # what one method assigns, an earlier one may use
            reader = _Reader(known, functions, own | _parameters(body, known))
            reader.visit(body)
            own |= {name: kind for name, kind in reader.scope.items() if name.startswith("self.")}
            optional = asked(body)
            yield from ((owner, f"{member}?" if member in optional else member) for owner, member in reader.found)


def asked(code: ast.AST) -> set[str]:
    """The attributes that it asks for with ``hasattr``."""
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr"]
    return {str(call.args[1].value) for call in calls if isinstance(call.args[1], ast.Constant)}


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, known: dict[str, Interface]) -> Scope:
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {one.arg: kind for one in given if (kind := _named(one.annotation, known))}


def _named(annotation: ast.expr | None, known: dict[str, Interface]) -> str | None:
    """The only interface that an annotation names: of what it holds, if it is a container."""
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()
    return next(iter(names & known.keys()), None)


class _Reader(ast.NodeVisitor):
    """Reads one function."""

    def __init__(self, known: dict[str, Interface], functions: Scope, scope: Scope) -> None:
        self.known, self.functions, self.scope = known, functions, scope
        self.found: list[tuple[str, str]] = []

    def kind(self, node: ast.expr) -> str | None:
        """The interface of a value, or of what it holds."""
        if isinstance(node, ast.Name) or ast.unparse(node) in self.scope:
            return self.scope.get(ast.unparse(node))
        if isinstance(node, ast.Attribute) and (owner := self.kind(node.value)):
            is_held = node.attr in _OF_CONTAINERS
            return owner if is_held else _named(self.known[owner].members.get(node.attr), self.known)
        if isinstance(node, ast.Call):
            return self.kind(node.func) or self.functions.get(ast.unparse(node.func).rpartition(".")[2])
        if isinstance(node, ast.BoolOp):
            return self.kind(node.values[0])
        return self.kind(node.value) if isinstance(node, ast.Subscript | ast.Starred) else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr not in _OF_CONTAINERS and (owner := self.kind(node.value)):
            self.found.append((owner, node.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and (owner := self.kind(node.func.value)):
            given = [keyword.arg for keyword in node.keywords if keyword.arg]
            given += [f"#{len(node.args)}"] if node.args else []
            self.found += [(owner, f"{node.func.attr}({one})") for one in given]
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assign(node.target, _named(node.annotation, self.known))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)
            self._take(target, node.value)

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        is_zip = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "zip"
        self._take(node.target, ast.Tuple(node.iter.args) if is_zip else node.iter)
        self.generic_visit(node)

    visit_comprehension = visit_For

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> None:
        for one in node.generators:
            self.visit(one)
        self.visit(node.elt)

    visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> None:
        for one in (*node.generators, node.key, node.value):
            self.visit(one)

    def _take(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, given in zip(target.elts, value.elts, strict=False):
                self._take(one, given)
        else:
            self._assign(target, self.kind(value))

    def _assign(self, target: ast.expr, kind: str | None) -> None:
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            if kind is not None:
                self.scope[ast.unparse(one)] = kind
