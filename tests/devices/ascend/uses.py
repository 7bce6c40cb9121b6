"""What rlcore uses of torch_npu, read from its own code: that of the plugin, and that of all devices.

A value's kind is followed through assignments, returns, properties, annotations and isinstance within a file: "npu" is
torch's module of the device, "npu.Event" a class of it, "npu.Event()" what that makes, "[npu.Stream()]" several. What
this cannot follow it does not see: what runs in the simulation is recorded there, and compared (``test_simulated.py``).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("devices", "collectives", "engines", "kernels", "bench", *(f"rlcore/{name}" for name in (
    "packed", "weights", "conformance", "quickstart", "doctor")))  # fmt: skip
ELSEWHERE = ("devices/cuda/", "devices/cpu/")
"""Code of other vendors' devices."""
_MAY_USE = re.compile(
    r"npu\(\)|torch_npu|torch\.npu|ops\.npu|_npu_|get_device_module|streams\.|torch\.(Stream|Event)|\.reductions"
)
"""In files without any of this no value has a kind to begin with."""

_ROOTS = {
    "torch.npu": "npu",
    "torch.ops.npu": "ops",
    "torch.TypedStorage": "storage",
    "torch.multiprocessing.reductions": "reductions",  # torch_npu replaces its functions
    "torch_npu": "torch_npu",
}
_MADE_BY = {
    "torch.get_device_module": "npu",
    "importlib.import_module('torch_npu.multiprocessing.reductions')": "reductions",
    "npu.current_stream": "npu.Stream()",
    "npu.get_device_properties": "properties",
    "npu.mem_get_info": "",
}
_ANNOTATED = {"torch.Stream": "npu.Stream()", "torch.Event": "npu.Event()"}
_OF_CONTAINERS = ("values", "get", "pop", "setdefault")


@dataclass(frozen=True, slots=True)
class Use:
    """One place where rlcore names something of torch_npu's."""

    name: str
    """Such as "npu.memory_allocated", "npu.Event().record", "ops.get_npu_format", "storage._share_npu_"."""
    arguments: tuple[str, ...] = ()
    """By position, as they stand there."""
    keywords: tuple[tuple[str, str], ...] = ()
    is_call: bool = False
    is_optional: bool = False
    """Asked for by hasattr or getattr: it may be absent."""
    place: str = ""


@functools.cache
def uses() -> list[Use]:
    """Of all files."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    paths += sorted((ROOT / "rlcore").glob("*.py"))
    texts = {path: path.read_text() for path in paths if not _is_elsewhere(path)}
    trees = {path: ast.parse(text) for path, text in texts.items() if _MAY_USE.search(text)}
    streams = _Reader(trees[ROOT / "devices" / "ascend" / "streams.py"]).returns
    streams["event"] = streams["_new_event"]  # TorchStreams.event returns it
    return [use for path, tree in trees.items() for use in uses_in(tree, path.name, streams)]


def _is_elsewhere(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix().startswith(ELSEWHERE)


def uses_in(tree: ast.AST, place: str, of_streams: dict[str, str] | None = None) -> Iterator[Use]:
    """Of one file. ``of_streams`` is what the members of ``device.streams`` return."""
    reader = _Reader(tree, of_streams or {})
    for use in reader.uses():
        yield replace(use, place=f"{place}:{use.place}")


@dataclass
class _Reader:
    """One file. Names are of the function they stand in, or of the file; ``self.x`` is of the file."""

    tree: ast.AST
    of_streams: dict[str, str] = field(default_factory=dict)
    returns: dict[str, str] = field(default_factory=dict)
    """Function -> kind of what it returns."""
    known: dict[str, str] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        functions = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function) if node is not function}
        self._outside = [node for node in ast.walk(self.tree) if id(node) not in inside]
        self._functions = [(function, list(ast.walk(function))) for function in functions if id(function) not in inside]
        for _ in range(3):  # what is assigned may come from what is returned further down, and that from another
            self._learn(self._outside, self.known)
            for function, nodes in self._functions:
                self._learn_function(function, nodes)

    def uses(self) -> Iterator[Use]:
        calls = {id(node.func): node for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        for scope, nodes in self._scopes():
            for node in nodes:
                if isinstance(node, ast.Attribute) and (owner := self._kind(node.value, scope)) and owner[0] != "[":
                    if node.attr.startswith("__"):
                        continue  # every object has it
                    if owner != "torch_npu" or id(node) in calls:
                        yield _use(f"{owner}.{node.attr}", calls.get(id(node)), node.lineno)
                elif (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and "." in scope.get(node.func.id, "")
                ):
                    yield _use(scope[node.func.id], node, node.lineno)
                elif isinstance(node, ast.Call) and _asks(node) and (owner := self._kind(node.args[0], scope)):
                    name = ast.literal_eval(node.args[1])
                    yield Use(f"{owner}.{name}", is_optional=True, place=str(node.lineno))

    def _scopes(self) -> Iterator[tuple[dict[str, str], list[ast.AST]]]:
        yield self.known, self._outside
        for _, nodes in self._functions:
            yield self._local(nodes), nodes

    def _local(self, nodes: list[ast.AST]) -> dict[str, str]:
        scope = dict(self.known)
        for _ in range(2):
            self._learn(nodes, scope)
        return scope

    def _learn_function(self, function: ast.FunctionDef, nodes: list[ast.AST]) -> None:
        local = self._local(nodes)
        self.known |= {text: kind for text, kind in local.items() if text.startswith("self.")}
        kinds = (self._kind(node.value, local) for node in nodes if isinstance(node, ast.Return) and node.value)
        if kind := next(filter(None, kinds), ""):
            self.returns[function.name] = kind
            if {"property", "functools.cached_property"} & set(map(ast.unparse, function.decorator_list)):
                self.known[f"self.{function.name}"] = kind

    def _learn(self, nodes: list[ast.AST], scope: dict[str, str]) -> None:
        """Kinds of names, from where they get their values."""
        for node in nodes:
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                    for target, value in zip(targets, values, strict=False):
                        self._set(target, self._kind(value, scope), scope)
                case (
                    ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value)
                ):
                    self._set(target, self._kind(value, scope) or _annotation(getattr(node, "annotation", None)), scope)
                case ast.AnnAssign(target=target, annotation=annotation):
                    self._set(target, _annotation(annotation), scope)
                    self.known[f"self.{ast.unparse(target)}"] = _annotation(annotation)
                case ast.arg(arg=name, annotation=annotation):
                    self._set(ast.Name(name), _annotation(annotation), scope)
                case ast.For(target=target, iter=iterated) | ast.comprehension(target=target, iter=iterated):
                    self._set(target, _element(self._kind(iterated, scope)), scope)
                case ast.Call(func=ast.Name(id="isinstance"), args=[what, of]) if kind := self._kind(of, scope):
                    self._set(what, f"{kind}()", scope)

    def _set(self, target: ast.AST, kind: str, scope: dict[str, str]) -> None:
        if isinstance(target, ast.Tuple) and kind[:1] == "[":
            for item in target.elts:
                self._set(item, _element(kind), scope)
        elif kind and isinstance(target, ast.Name | ast.Attribute):
            scope[ast.unparse(target)] = kind

    def _text(self, node: ast.AST) -> str:
        if id(node) not in self._texts:
            self._texts[id(node)] = ast.unparse(node)
        return self._texts[id(node)]

    def _kind(self, node: ast.AST, scope: dict[str, str]) -> str:  # noqa: PLR0911 - each form of expression has one
        text = self._text(node)
        if found := scope.get(text) or _ROOTS.get(text) or _MADE_BY.get(text):
            return found
        match node:
            case ast.Attribute(value=value, attr=name) if (owner := self._kind(value, scope)) and owner[0] != "[":
                return f"{owner}.{name}"
            case ast.Subscript(value=value):
                return _element(self._kind(value, scope))
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Dict(values=items) if items:
                return next((f"[{kind}]" for item in items if (kind := self._kind(item, scope))), "")
            case ast.ListComp(elt=item) | ast.DictComp(value=item) | ast.GeneratorExp(elt=item):
                return f"[{kind}]" if (kind := self._kind(item, scope)) else ""
            case ast.BoolOp(values=items):
                return next((kind for item in items if (kind := self._kind(item, scope))), "")
            case ast.IfExp(body=body, orelse=otherwise):
                return self._kind(body, scope) or self._kind(otherwise, scope)
            case ast.NamedExpr(value=value):
                return self._kind(value, scope)
            case ast.Call(func=function):
                return self._made(function, scope)
        return ""

    def _made(self, function: ast.expr, scope: dict[str, str]) -> str:  # noqa: PLR0911 - each form of call has one
        """Kind of what a call returns."""
        text = self._text(function)
        if text in _MADE_BY:
            return _MADE_BY[text]
        if isinstance(function, ast.Name):
            return self.returns.get(text, "") or ("npu" if text == "npu" else "")
        if not isinstance(function, ast.Attribute):
            return ""
        if self._text(function.value).endswith(("streams", "_streams")) and function.attr in self.of_streams:
            return self.of_streams[function.attr]
        if isinstance(function.value, ast.Name) and function.value.id == "self" and function.attr in self.returns:
            return self.returns[function.attr]
        owner = self._kind(function.value, scope)
        if owner[:1] == "[":
            return (owner if function.attr == "values" else _element(owner)) if function.attr in _OF_CONTAINERS else ""
        name = f"{owner}.{function.attr}"
        if name in _MADE_BY:
            return _MADE_BY[name]
        if owner and function.attr[:1].isupper():
            return f"{name}()"
        is_class = owner.rpartition(".")[2][:1].isupper() and not owner.endswith(")")
        return f"{owner}()" if is_class else ""  # such as Event.from_ipc_handle


def _use(name: str, call: ast.Call | None, line: int) -> Use:
    if call is None:
        return Use(name, place=str(line))
    arguments = tuple(map(ast.unparse, call.args))
    keywords = tuple((keyword.arg or "**", ast.unparse(keyword.value)) for keyword in call.keywords)
    return Use(name, arguments, keywords, is_call=True, place=str(line))


def _asks(node: ast.Call) -> bool:
    is_name = isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr")
    return is_name and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)


def _annotation(node: ast.expr | None) -> str:
    return "" if node is None else _ANNOTATED.get(ast.unparse(node).removesuffix(" | None"), "")


def _element(kind: str) -> str:
    return kind[1:-1] if kind[:1] == "[" else ""
