"""A torch that cannot be imported: every public name says so, with the first cause, however often it is asked.

Two such torches are planted: this one with a back end that fails, as torch-npu's wheel does without CANN, and one that
fails itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CAUSE = "libacme.so: cannot open shared object file"
TOLD_BACK_END = (
    "import torch failed: RuntimeError: Failed to load the backend extension: acme_npu. You can disable extension "
    f"auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0. (ImportError: {CAUSE}); `rlcore doctor` says what to do"
)
TOLD_ITSELF = f"import torch failed: OSError: {CAUSE}; `rlcore doctor` says what to do"

ASK = """
import json, rlcore, rlcore.ops
found = []
def ask(get):
    try:
        found.append(["", str(get())])
    except Exception as error:
        found.append([" ".join(kind.__name__ for kind in type(error).mro()), str(error)])
{}
print(json.dumps(found))
"""


@pytest.fixture(params=["a back end", "torch itself"])
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """A folder for the path, and what is to be told."""
    if request.param == "torch itself":
        return str(broken_torch(tmp_path)), TOLD_ITSELF
    return str(with_back_end(tmp_path)), TOLD_BACK_END


def broken_torch(folder: Path) -> Path:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(f"raise OSError({CAUSE!r})")
    return folder


def with_back_end(folder: Path) -> Path:
    (folder / "acme_npu.py").write_text(f"raise ImportError({CAUSE!r})")
    info = folder / "acme_npu-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-npu\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nacme_npu = acme_npu:_autoload\n")
    return folder


def ask(run_python: Any, folder: str, *lines: str) -> list[list[str]]:
    result = run_python(ASK.format("\n".join(lines)), env={"PYTHONPATH": folder})
    assert result.returncode == 0, result.stderr
    found: list[list[str]] = json.loads(result.stdout)
    return found


def test_every_device_and_public_name_says_the_first_cause_each_time(broken: tuple[str, str], run_python: Any) -> None:
    folder, told = broken
    (_, default), (_, named), *found = ask(
        run_python,
        folder,
        "ask(rlcore.get_device)",
        "ask(lambda: rlcore.get_device('cpu'))",
        "for _ in range(2):",
        "    for name in rlcore.ops.__all__:",
        "        ask(lambda: getattr(rlcore.ops, name))",
        "for name in rlcore.__all__:",
        "    ask(lambda: getattr(rlcore, name))",
    )
    assert default == f"no device is available: cuda, npu, cpu: {told}. See `rlcore devices`."
    assert named == f"device 'cpu' is not available here: {told}. See `rlcore devices`."
    failed = [error for error in found if error[0]]
    assert {error for _, error in failed} == {told}
    assert told.count(CAUSE) == 1
    assert {kinds.split()[0] for kinds, _ in failed} == {"TorchImportError"}
    assert {"RlcoreError", "ImportError"} <= set(failed[0][0].split())
    assert len(found) - len(failed) == 7, "version, errors, hooks, span, types and the registry need no torch"


@pytest.mark.parametrize("broken", [pytest.param("a back end", marks=pytest.mark.slow), "torch itself"], indirect=True)
def test_the_import_statement_of_a_program_says_it_twice_alike(broken: tuple[str, str], run_python: Any) -> None:
    folder, told = broken
    code = "import rlcore\ntry:\n    from rlcore.ops import linear_loss\nexcept ImportError as error:\n    print(error)"
    result = run_python(f"{code}\nfrom rlcore.ops import gae", env={"PYTHONPATH": folder})
    assert result.stdout == f"{told}\n"
    assert result.stderr.splitlines()[-1] == f"rlcore.errors.TorchImportError: {told}"
    assert "TORCH_LIBRARY" not in result.stderr


@pytest.mark.slow
def test_a_cause_that_somebody_else_has_seen_is_not_replaced_by_what_torch_says_next(
    tmp_path: Path, run_python: Any
) -> None:
    lines = ("try:", "    import torch", "except RuntimeError:", "    pass", "ask(lambda: rlcore.ops.linear_loss)")
    ((_, told),) = ask(run_python, str(with_back_end(tmp_path)), *lines)
    before = "it failed before in this process, where its first error has the cause"
    assert told == f"import torch failed: ImportError: {before}; `rlcore doctor` says what to do"


@pytest.mark.parametrize("command", [["quickstart"], ["ops", "explain", "gae"], ["bench", "run"], ["devices", "cpu"]])
def test_commands_say_it_in_one_line(tmp_path: Path, run_python: Any, command: list[str]) -> None:
    result = run_python(["-m", "rlcore", *command], env={"PYTHONPATH": str(broken_torch(tmp_path))})
    (line,) = result.stderr.splitlines()
    assert (result.returncode, line.startswith("rlcore: "), line.count(TOLD_ITSELF)) == (1, True, 1)
