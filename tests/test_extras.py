"""pip finds versions for every extra, within the ranges of pyproject.toml and the versions of constraints.txt."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]
HEAVY = {
    "ascend": "torch-npu",
    "flash-attn": "flash-attn, whose build needs torch and CUDA's compiler,",
    "sglang": "SGLang, with a torch for CUDA and its kernels,",
    "verl": "verl and Ray",
    "vllm": "vLLM, with a torch for CUDA,",
}
"""What pip would download to read its requirements: gigabytes. docs/installation.md has what they resolve to."""


def would_install(folder: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-build-isolation", "--report", "-"]
    command += ["-c", str(ROOT / "constraints.txt"), *requirements]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what pip reads of this one, into which it writes; skip where pip has no index."""
    folder = tmp_path_factory.mktemp("clone")
    found = would_install(folder, "--ignore-installed", "--no-deps", "pluggy")
    if found.returncode != 0:
        pytest.skip(f"pip reaches no index: {found.stderr.strip().splitlines()[-1]}")
    (folder / "src").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "src" / "rlcore").symlink_to(ROOT / "rlcore")
    return folder


def test_the_extras_resolve_together(clone: Path) -> None:
    """So each does by itself; what HEAVY has is left out."""
    light = sorted(EXTRAS.keys() - HEAVY)
    found = would_install(clone, f".[{','.join(light)}]")
    assert found.returncode == 0, found.stderr
    (chosen,) = (each for each in installed(found) if each["name"] == "rlcore")
    assert set(light) <= set(chosen["provides_extra"])


@pytest.mark.parametrize("extra", sorted(HEAVY))
def test_an_extra_that_is_not_tried_is_one(extra: str) -> None:
    """And the other skips say why nothing more is asked."""
    assert extra in EXTRAS
    pytest.skip(f"pip would download {HEAVY[extra]} to read what it requires")


def installed(found: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [each["metadata"] for each in json.loads(found.stdout)["install"]]


def test_a_range_that_nothing_is_in_does_not_resolve(clone: Path) -> None:
    """Otherwise the test above could not fail."""
    found = would_install(clone, ".[bench]", "jinja2>=99")
    assert found.returncode != 0 and "jinja2" in found.stderr.lower()
