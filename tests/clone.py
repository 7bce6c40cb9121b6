"""A copy of this checkout, as far as a build of the package reads it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def clone(folder: Path) -> Path:
    """Make the copy, and return its folder. The modules are linked."""
    (folder / "src").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "rlcore").symlink_to(ROOT / "rlcore")
    shutil.copy(ROOT / "src" / "rlcore", folder / "src", follow_symlinks=False)
    return folder


def build(cloned: Path, kind: str, wheels: Path) -> Path:
    """Build a copy without an index; return the wheel.

    Args:
        kind: "wheel", or "editable".
    """
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(wheels)!r})"
    built = subprocess.run([sys.executable, "-c", code], cwd=cloned, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("*.whl")
    return wheel
