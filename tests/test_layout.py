"""The rules of the house: where folders import from, which way imports point, that kernels know no vendor.

Each rule is a function over a tree of files that returns what breaks it; it is run on this repository, and on
planted trees that break it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import inspect
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import rlcore
import rlcore.nn
import rlcore.ops
from rlcore.compat import rlite
from rlcore.device import Collectives, Device, Memory, Profiler, Streams
from rlcore.hookspecs import Hooks
from rlcore.launch import LaunchFacts
from rlcore.types import DeviceSpec

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "collectives", "devices", "engines", "kernels")
LINKED = (*FOLDERS, "examples")
"""Folders of the root that rlcore/ has links to. The examples are programs and no part of the layers."""
BASE = {
    "_torch_private",
    "activations",
    "arguments",
    "atomic",
    "compute_dtype",
    "deadline",
    "decoding",
    "device",
    "errors",
    "evaluation_mode",
    "file_lock",
    "float8_linear",
    "held_memory",
    "image_inputs",
    "logit_form",
    "types",
    "hookspecs",
    "launch",
    "meta",
    "packed",
    "parallel_plans",
    "planned",
    "plugins",
    "probing",
    "process",
    "registry",
    "rms_norm",
    "routing",
    "sequence_input",
    "settings",
    "spans",
    "tensor_data",
    "tensor_tree",
    "torch_import",
    "nn",
    "weights",
}
BELOW = {
    "base": set(),
    "devices": {"base"},
    "kernels": {"base"},
    "collectives": {"base"},
    "engines": {"base", "kernels", "collectives"},
    "bench": {"base", "kernels", "collectives", "engines"},
    "front": {"base", "kernels", "collectives", "engines", "bench", "devices"},
}
"""What each part may import besides itself. ``devices`` is reached through the registry."""

EXECUTORS = ("fsdp2", "deepspeed", "sampling.hf", "sampling.vllm", "sampling.sglang", "sampling")
"""The rooms of executors, of which none imports from another: what two of them need is below them."""

ROOMS = {
    "engines": (
        ("_torch_private", "residency", "need_parallel", "rank_batch", "batch", *(f"sampling.{name}" for name in (
            "completion", "draws", "params", "model_folder", "prompts", "progress", "request_queue", "seeds"))),
        ("launchers", "offload"),
        ("checkpoints", "weight_sync"),
        ("executors",),
        ("sampling.replica",),
        EXECUTORS,
        ("memory_plan",),
        ("engine", "runtime", "placement", "checkpointing", "swapping", "mismatch_cause", "train", "inference",
            "plugin"),
    ),
    "kernels": (
        ("_torch_private", "dispatch", "operands", "row_stats", "softmax_rows", "chunks", "cu_seqlens", "packing",
            "tile_choices", "triton_programs", "vocab_shard"),
        ("autograd", "losses", "returns", "strided_copy", "triton_target"),
        ("token",),
        ("linear",),
        ("plugin", "tuning"),
    ),
    "bench": (
        ("record", "steps"),
        ("case", "compare"),
        ("measurement", "reports"),
        ("run", "plugin"),
        ("publish", "pytest_plugin", "cases"),
    ),
    "rlcore": (
        ("cli.console", "cli.inventory"),
        ("conformance", "doctor", "integrations", "rollout", "trace"),
        ("configuration_file", "step_log", "chaos", "quickstart"),
        ("compat", "parity", "training"),
        ("planning",),
        ("cli", "__main__"),
    ),
}  # fmt: skip
"""Files and folders of a part, from the lowest: each imports from its own row and from those above it in this table.
Of rlcore/ it has the folders of the front alone."""

VENDOR = re.compile(r"cuda|nvidia|nccl|rocm|npu(?![a-z])|ascend(?![a-z])|hccl|cann(?![a-z])|xpu|gaudi", re.IGNORECASE)

HALF_SENTENCES = {"Of", "What", "Whether", "Those"}

PRIVATE_OF_TORCH = {
    name
    for owner in (
        *(torch, torch.Tensor, torch.UntypedStorage, torch.nn.Module(), torch.optim.Optimizer),
        *(torch.autograd.Variable, torch._ops.OpOverload, FSDPModule, FSDPState, distributed_c10d),
        *(dist.Backend, dist.ProcessGroup, dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options),
    )
    for name in dir(owner)
    if re.match("_[^_]", name)
}
"""The private attributes of torch's modules and classes."""

DEVICE_TYPE = {"type", "device_type", "torch_type"}
DEVICE_NAME = re.compile(r"cpu|cuda|hip|npu|xpu|mps|hpu|musa|mlu|privateuseone")

Rule = Callable[[Path], list[str]]


# -------------------------------------------------------------------------------------------------- rules


def broken_links(root: Path) -> list[str]:
    found = []
    for link in (*(f"rlcore/{folder}" for folder in LINKED), "src/rlcore"):
        target = Path("..", Path(link).name)
        if not ((root / link).is_symlink() and (root / link).readlink() == target and (root / link).is_dir()):
            found.append(f"{link} is not a link to {target}")
    return found


def root_packages(root: Path) -> list[str]:
    return [f"{folder}/__init__.py" for folder in FOLDERS if (root / folder / "__init__.py").exists()]


def upward_imports(root: Path) -> list[str]:
    found = []
    for path in _python_files(root):
        part = _part_of_file(path.relative_to(root))
        for line, module in _rlcore_imports(path):
            target = _part_of_module(module)
            if target not in BELOW[part] | {part}:
                found.append(f"{path.relative_to(root)}:{line} ({part}) imports {module} ({target})")
    return found


def upward_imports_within(root: Path) -> list[str]:
    """Imports against the order of ``ROOMS``, and files that the table lacks."""
    found = []
    for path in _python_files(root):
        part = path.relative_to(root).parts[0]
        if part not in ROOMS:
            continue
        own = _floor(part, ".".join(path.relative_to(root / part).with_suffix("").parts))
        if own is None and part == "rlcore":
            continue
        if own is None:
            found.append(f"{path.relative_to(root)} is in no room of {part}")
            continue
        for line, module in _rlcore_imports(path):
            prefix = "rlcore." if part == "rlcore" else f"rlcore.{part}."
            target = _floor(part, module.removeprefix(prefix))
            if module.startswith(prefix) and target is not None and target > own:
                found.append(f"{path.relative_to(root)}:{line} imports {module}, which is above it")
    return found


def circles_of_imports(root: Path) -> list[str]:
    """Files that import each other as they load, or for the types of their arguments."""
    files = {_module_of_file(path.relative_to(root)): path for path in _python_files(root)}
    graph = {module: _imported_as_it_loads(path, files.keys() - {"rlcore"}) for module, path in files.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def imports_between_executors(root: Path) -> list[str]:
    found = []
    for path in _python_files(root):
        own = _executor(".".join(path.relative_to(root).with_suffix("").parts))
        for line, module in _rlcore_imports(path):
            target = _executor(module.removeprefix("rlcore."))
            if own and target and target != own:
                found.append(f"{path.relative_to(root)}:{line} imports {module}, of another executor")
    return found


def _executor(module: str) -> str:
    return next((name for name in EXECUTORS[:-1] if f"{module}.".startswith(f"engines.{name}.")), "")


def docstrings_without_subject(root: Path) -> list[str]:
    """Docstrings of modules, classes, functions and attributes that begin as half a sentence."""
    return [
        f"{path.relative_to(root)}:{line} begins with {text.split()[0]!r}"
        for path in _python_files(root)
        for node in _nodes(path)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for line, text in _docstrings(node.body)
        if text.split()[0] in HALF_SENTENCES
    ]


def class_names_used_twice(root: Path) -> list[str]:
    places: dict[str, list[str]] = {}
    for path in _python_files(root):
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{path.relative_to(root)}:{node.lineno}")
    return [f"class {name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def root_name_imports(root: Path) -> list[str]:
    """``from kernels.x import y`` or a relative import: a second copy of the module, or somebody else's."""
    found = []
    for path in _python_files(root):
        for node in _nodes(path):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = ["." * node.level + (node.module or "")]
            found += [
                f"{path.relative_to(root)} imports {module}"
                for module in modules
                if module.split(".")[0] in {*FOLDERS, ""}
            ]
    return found


def vendors_named_in_kernels(root: Path) -> list[str]:
    found = []
    for path in sorted((root / "kernels").rglob("*.py")):
        found += [
            f"{path.relative_to(root)}:{line} names {word!r}" for line, word in _words(path) if VENDOR.search(word)
        ]
    return found


def torch_cuda_elsewhere(root: Path) -> list[str]:
    """Uses of ``torch.cuda`` outside devices/cuda."""
    found = []
    for path in _python_files(root):
        if path.is_relative_to(root / "devices" / "cuda"):
            continue
        for node in _nodes(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = [f"{node.value.id}.{node.attr}"]
            else:
                continue
            if any(name == "torch.cuda" or name.startswith("torch.cuda.") for name in names):
                found.append(f"{path.relative_to(root)}:{node.lineno} uses torch.cuda")
    return sorted(set(found))


def private_names_of_torch(root: Path) -> list[str]:
    """Uses of torch's private modules and attributes outside the files called ``_torch_private.py``."""
    found = []
    for path in _python_files(root):
        if path.name == "_torch_private.py":
            continue
        for node in _nodes(path):
            if isinstance(node, ast.Import):
                uses = [alias.name for alias in node.names if _is_private_module(alias.name)]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                uses = [name for name in names if _is_private_module(name)]
            else:
                uses = [node.attr] if isinstance(node, ast.Attribute) and _is_private_attribute(node) else []
            found += [f"{path.relative_to(root)}:{node.lineno} uses {name}" for name in uses]
    return found


def comparisons_with_a_device(root: Path) -> list[str]:
    """``x.type == "cuda"`` and its like outside devices/: ask the device for a fact or a capability instead."""
    found = []
    for path in _python_files(root):
        if path.is_relative_to(root / "devices"):
            continue
        for node in _nodes(path):
            if isinstance(node, ast.Compare):
                subjects, parts = [node.left, *node.comparators], ast.walk(node)
            elif isinstance(node, ast.Match):
                subjects, parts = [node.subject], (x for case in node.cases for x in ast.walk(case.pattern))
            else:
                continue
            asks = any(_last_name(x) in DEVICE_TYPE for x in subjects)
            if asks and any(isinstance(x, ast.Constant) and DEVICE_NAME.fullmatch(str(x.value)) for x in parts):
                found.append(f"{path.relative_to(root)}:{node.lineno} asks which device it is")
    return found


def public_names_without_test(root: Path, names: Iterable[str] | None = None) -> list[str]:
    """Public names, those that the project offers if not given, that no test has as a word."""
    files = [path for path in (root / "tests").rglob("*.py") if path.name != "test_layout.py"]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text("utf-8"))}
    return sorted(set(public_names() if names is None else names) - words)


# ------------------------------------------------------------------------------------------------ helpers


def public_names() -> Iterator[str]:
    """Yield what users import, and the members of what plugins write."""
    yield from (name for name in (*rlcore.__all__, *rlcore.ops.__all__, *rlite.__all__) if name != "__version__")
    own = {name: value for name, value in vars(rlcore.nn).items() if getattr(value, "__module__", "") == "rlcore.nn"}
    for names in (own, *map(vars, (Hooks, Device, Memory, Streams, Collectives, Profiler, LaunchFacts, rlite.nn))):
        yield from (name for name in names if not name.startswith("_"))
    yield from (field.name for field in dataclasses.fields(DeviceSpec))
    yield from inspect.signature(rlite.init).parameters


def _floor(part: str, module: str) -> int | None:
    """Return the row of ``ROOMS`` with the longest name that the module begins with."""
    names = {name: row for row, rooms in enumerate(ROOMS[part]) for name in rooms}
    fitting = [name for name in names if f"{module}.".startswith(f"{name}.")]
    return names[max(fitting, key=len)] if fitting else None


def _python_files(root: Path) -> Iterator[Path]:
    for folder in ("rlcore", *FOLDERS):
        for path in sorted((root / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.relative_to(root).parents):
                yield path


def _part_of_file(path: Path) -> str:
    return path.parts[0] if path.parts[0] in FOLDERS else _part_of_module(".".join(path.with_suffix("").parts))


def _part_of_module(module: str) -> str:
    second = module.split(".")[1] if "." in module else ""
    return second if second in FOLDERS else "base" if second in BASE else "front"


def _module_of_file(path: Path) -> str:
    inner = path.with_suffix("").parts[path.parts[0] == "rlcore" :]
    return ".".join(("rlcore", *inner)).removesuffix(".__init__")


def _imported_as_it_loads(path: Path, modules: Set[str]) -> set[str]:
    """The modules that a file imports outside of functions; what is under TYPE_CHECKING counts."""
    found, bodies = set(), [ast.parse(path.read_text()).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.ImportFrom):
                found |= {name for a in node.names if (name := f"{node.module}.{a.name}") in modules} or {node.module}
            elif isinstance(node, (ast.If, ast.Try)):
                bodies += [node.body, node.orelse]
    return found & modules


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """All of a file; most rules look at the same files."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def _rlcore_imports(path: Path) -> list[tuple[int, str]]:
    return list(_imports_of_rlcore(path))


def _imports_of_rlcore(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of rlcore, in functions and under TYPE_CHECKING too."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] == "rlcore")
        elif isinstance(node, ast.ImportFrom) and node.module == "rlcore":
            # The version is no front door; every other name of rlcore/__init__.py is one.
            yield from ((node.lineno, f"rlcore.{alias.name}") for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlcore."):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("rlcore."):
                    yield node.lineno, str(argument.value)


def _is_private_module(name: str) -> bool:
    first, *others = name.split(".")
    return first == "torch" and any(part.startswith("_") or part == "distributed_c10d" for part in others)


def _is_private_attribute(node: ast.Attribute) -> bool:
    """Return True for an attribute that torch has, but not on an object of the class that the code is in."""
    if node.attr == "distributed_c10d":
        return True
    return node.attr in PRIVATE_OF_TORCH and ast.unparse(node.value) not in {"self", "cls", "os", "torch_npu"}


def _docstrings(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstring of a body, and of those of its attributes."""
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            text = statement.value.value
            if isinstance(text, str) and text.strip():
                yield statement.lineno, text


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _words(path: Path) -> Iterator[tuple[int, str]]:
    """Identifiers and strings of the code; not comments and docstrings."""
    docstrings = {
        id(node.value) for node in _nodes(path) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in _nodes(path):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


# -------------------------------------------------------------------------------- this repository keeps them


@pytest.mark.parametrize(
    "rule",
    [
        broken_links,
        root_packages,
        upward_imports,
        upward_imports_within,
        circles_of_imports,
        imports_between_executors,
        docstrings_without_subject,
        class_names_used_twice,
        root_name_imports,
        vendors_named_in_kernels,
        torch_cuda_elsewhere,
        private_names_of_torch,
        comparisons_with_a_device,
        public_names_without_test,
    ],
)
def test_repository_keeps_rule(rule: Rule) -> None:
    assert rule(ROOT) == []


def test_links_are_committed_as_links() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "--stage", *(f"rlcore/{folder}" for folder in LINKED)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert [line.split()[0] for line in listing.splitlines()] == ["120000"] * len(LINKED)


def test_root_folder_names_are_not_importable_from_elsewhere(tmp_path: Path, run_python: Callable) -> None:
    code = (
        "import importlib.util, pathlib, sys\n"
        f"specs = [importlib.util.find_spec(name) for name in {FOLDERS}]\n"
        "places = [str(place) for s in specs if s for place in s.submodule_search_locations or []]\n"
        f"print([place for place in places if pathlib.Path(place).is_relative_to({str(ROOT)!r})])"
    )
    assert run_python(code, cwd=tmp_path, env={"PYTHONPATH": ""}).stdout == "[]\n"
    # With the checkout on the path the same code finds them, so the check above can fail.
    planted = run_python(code, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}).stdout
    assert str(ROOT / "bench") in planted


def test_checkout_on_the_path_does_not_shadow_another_kernels_package(tmp_path: Path, run_python: Callable) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("owner = 'somebody else'")
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    assert run_python("import kernels; print(kernels.owner)", env=path).stdout == "somebody else\n"


@pytest.mark.slow
def test_every_file_imports_under_rlcore(tmp_path: Path, run_python: Callable) -> None:
    modules = [
        ".".join(("rlcore", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    code = f"import importlib\nfor name in {modules}: importlib.import_module(name)\nprint(len({modules}))"
    result = run_python(code, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"{len(modules)}\n"), result.stderr


# ------------------------------------------------------------------------------------- and each rule can fail


def plant(root: Path, file: str, text: str) -> Path:
    for folder in LINKED:
        (root / folder).mkdir(exist_ok=True)
    (root / "rlcore").mkdir(exist_ok=True)
    for folder in LINKED:
        (root / "rlcore" / folder).symlink_to(Path("..", folder))
    (root / "src").mkdir()
    (root / "src" / "rlcore").symlink_to(Path("..", "rlcore"))
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)
    return root


def test_a_folder_instead_of_a_link_is_found(tmp_path: Path) -> None:
    root = plant(tmp_path, "rlcore/errors.py", "")
    assert broken_links(root) == []
    (root / "rlcore" / "bench").unlink()
    (root / "rlcore" / "bench").mkdir()
    assert broken_links(root) == ["rlcore/bench is not a link to ../bench"]


@pytest.mark.parametrize("folder", ["bench", "examples"])
def test_a_link_to_the_wrong_folder_is_found(tmp_path: Path, folder: str) -> None:
    root = plant(tmp_path, "rlcore/errors.py", "")
    (root / "rlcore" / folder).unlink()
    (root / "rlcore" / folder).symlink_to(Path("..", "engines"))
    assert broken_links(root) == [f"rlcore/{folder} is not a link to ../{folder}"]


def test_a_package_in_the_place_of_the_link_for_installations_is_found(tmp_path: Path) -> None:
    root = plant(tmp_path, "rlcore/errors.py", "")
    (root / "src" / "rlcore").unlink()
    (root / "src" / "rlcore").mkdir()
    assert broken_links(root) == ["src/rlcore is not a link to ../rlcore"]


def test_a_package_in_the_root_is_found(tmp_path: Path) -> None:
    assert root_packages(plant(tmp_path, "kernels/__init__.py", "")) == ["kernels/__init__.py"]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("rlcore/errors.py", "import rlcore.kernels.losses"),
        ("rlcore/registry.py", "from rlcore import get_device"),
        ("kernels/a.py", "from rlcore.collectives.groups import x"),
        ("kernels/a.py", "from rlcore.devices.generic import x"),
        ("collectives/a.py", "def f():\n    from rlcore.kernels.dispatch import x"),
        ("devices/a.py", "from rlcore.engines.engine import x"),
        ("engines/a.py", "if TYPE_CHECKING:\n    from rlcore.devices.generic import x"),
        ("engines/a.py", "importlib.import_module('rlcore.devices.generic')"),
        ("engines/a.py", "from rlcore.bench.case import x"),
        ("bench/a.py", "from rlcore.cli.main import main"),
        ("bench/a.py", "from rlcore.devices.generic import x"),
    ],
)
def test_an_import_that_points_up_or_sideways_is_found(tmp_path: Path, file: str, code: str) -> None:
    (found,) = upward_imports(plant(tmp_path, file, code))
    assert found.startswith(f"{file}:")


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("engines/a.py", "from rlcore.kernels.dispatch import x"),
        ("bench/a.py", "from rlcore import __version__"),
        ("rlcore/cli/main.py", "from rlcore.bench.case import x"),
    ],
)
def test_an_import_that_points_down_is_accepted(tmp_path: Path, file: str, code: str) -> None:
    assert upward_imports(plant(tmp_path, file, code)) == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("engines/offload/a.py", "from rlcore.engines.engine import Engine"),
        ("engines/sampling/hf/a.py", "def f():\n    from rlcore.engines.inference import x"),
        ("engines/sampling/params.py", "from rlcore.engines.sampling.hf.executor import x"),
        ("engines/weight_sync/planning/a.py", "if TYPE_CHECKING:\n    from rlcore.engines.fsdp2.sharding import x"),
        ("kernels/token/a.py", "from rlcore.kernels.linear.loss import x"),
        ("kernels/elsewhere.py", "pass"),
        ("rlcore/rollout/a.py", "from rlcore.compat.rlite import x"),
    ],
)
def test_an_import_that_points_up_within_a_part_is_found(tmp_path: Path, file: str, code: str) -> None:
    (found,) = upward_imports_within(plant(tmp_path, file, code))
    assert found.startswith(file)


@pytest.mark.parametrize(
    "code", ["from rlcore.kernels.b import x", "if TYPE_CHECKING:\n    from rlcore.kernels import b"]
)
def test_files_that_import_each_other_are_found(tmp_path: Path, code: str) -> None:
    root = plant(tmp_path, "kernels/a.py", code)
    (root / "kernels/b.py").write_text("from rlcore.kernels.a import y")
    (found,) = circles_of_imports(root)
    assert set(found.split(" imports ")) == {"rlcore.kernels.a", "rlcore.kernels.b"}
    (root / "kernels/b.py").write_text("def late():\n    from rlcore.kernels.a import y")
    assert circles_of_imports(root) == []


def test_an_import_of_another_executor_is_found(tmp_path: Path) -> None:
    code = "from rlcore.engines.fsdp2.sharding import x"
    root = plant(tmp_path, "engines/deepspeed/a.py", code)
    (root / "engines/fsdp2").mkdir()
    (root / "engines/fsdp2/own.py").write_text(code)
    (found,) = imports_between_executors(root)
    assert found.startswith("engines/deepspeed/a.py")


def test_half_a_sentence_and_a_name_used_twice_are_found(tmp_path: Path) -> None:
    code = 'class A:\n    """What it is."""\n\n\nclass _A:\n    """It is."""\n\n    x = 1\n    """Of all."""\n'
    root = plant(tmp_path, "engines/a.py", code)
    assert docstrings_without_subject(root) == [
        "engines/a.py:2 begins with 'What'",
        "engines/a.py:9 begins with 'Of'",
    ]
    assert class_names_used_twice(root) == ["class A: engines/a.py:1, engines/a.py:5"]


@pytest.mark.parametrize("code", ["import kernels.losses", "from bench.case import x", "from . import x"])
def test_an_import_by_root_name_is_found(tmp_path: Path, code: str) -> None:
    (found,) = root_name_imports(plant(tmp_path, "bench/a.py", code))
    assert found.startswith("bench/a.py imports ")


@pytest.mark.parametrize(
    "code", ["x.is_cuda", "torch.npu.x()", "f('ascend')", "import torch_npu", "def is_rocm(): ..."]
)
def test_a_vendor_in_kernels_is_found(tmp_path: Path, code: str) -> None:
    assert vendors_named_in_kernels(plant(tmp_path, "kernels/a.py", code))


def test_ordinary_words_are_no_vendor(tmp_path: Path) -> None:
    code = '"""Fast on CUDA."""\ninputs = input_ids = cannot = ascending = 1  # npu'
    assert vendors_named_in_kernels(plant(tmp_path, "kernels/a.py", code)) == []


@pytest.mark.parametrize(
    "code",
    ["torch.cuda.synchronize()", "import torch.cuda", "from torch import cuda", "from torch.cuda import graphs"],
)
def test_torch_cuda_is_found_outside_its_folder(tmp_path: Path, code: str) -> None:
    root = plant(tmp_path, "devices/generic.py", code)
    (root / "devices" / "cuda").mkdir()
    (root / "devices" / "cuda" / "device.py").write_text(code)
    assert torch_cuda_elsewhere(root) == ["devices/generic.py:1 uses torch.cuda"]


@pytest.mark.parametrize(
    "code",
    [
        "torch._foreach_copy_(a, b)",
        "import torch._dynamo",
        "from torch import _dynamo",
        "from torch.utils._pytree import tree_map",
        "import torch.distributed.distributed_c10d as c10d",
        "dist.distributed_c10d.new_group()",
        "module._parameters['weight'] = 1",
        "key = tensor.untyped_storage()._cdata",
        "group._set_group_name('x')",
        "state = block._get_fsdp_state()",
    ],
)
def test_a_private_name_of_torch_is_found_outside_its_file(tmp_path: Path, code: str) -> None:
    root = plant(tmp_path, "engines/a.py", code)
    (root / "engines" / "_torch_private.py").write_text(code)
    (found,) = private_names_of_torch(root)
    assert found.startswith("engines/a.py:1 uses ")


def test_own_private_names_are_not_those_of_torch(tmp_path: Path) -> None:
    code = "from rlcore.kernels import _torch_private\nself._parameters = found._replace(x=1)\nfound._asdict()"
    assert private_names_of_torch(plant(tmp_path, "engines/a.py", code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "if device.type == 'cuda': ...",
        "x = 1 if 'npu' != tensor.device.type else 2",
        "a = device.type in ('cuda', 'xpu')",
        "a = None if device_type == 'cpu' else 1",
        "match device.type:\n    case 'cpu' | 'mps': ...",
    ],
)
def test_a_comparison_with_a_device_is_found(tmp_path: Path, code: str) -> None:
    root = plant(tmp_path, "engines/a.py", code)
    (root / "devices" / "generic.py").write_text(code)
    assert comparisons_with_a_device(root) == ["engines/a.py:1 asks which device it is"]


def test_a_public_name_that_is_in_no_test_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests" / "base").mkdir(parents=True)
    (tmp_path / "tests" / "base" / "test_one.py").write_text("assert balance([1], max_tokens=2)")
    (tmp_path / "tests" / "test_layout.py").write_text("'gae'")
    assert public_names_without_test(tmp_path, ["balance", "max_token", "gae"]) == ["gae", "max_token"]
    assert {"TrainEngine", "gae", "TrainModule", "rlcore_register_launchers", "vllm_plugin"} <= {*public_names()}
    assert {"new_backend", "host_alloc", "worker_environment", "Fsdp2TrainModule", "dedup_logs"} <= {*public_names()}


def test_other_types_may_be_compared(tmp_path: Path) -> None:
    code = "a = need.type == 'seq'; b = x.type == y.type; c = name == 'cuda'"
    assert comparisons_with_a_device(plant(tmp_path, "engines/a.py", code)) == []
