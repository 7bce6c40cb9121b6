"""An editable installation from a clone, and the wheel, built without an index from a copy of what the build reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import rlcore

ROOT = Path(__file__).resolve().parents[1]


def test_an_editable_install_is_found_from_the_folder_in_which_the_clone_lies(tmp_path: Path) -> None:
    clone = tmp_path / "rlcore"
    (clone / "src").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (clone / "rlcore").symlink_to(ROOT / "rlcore")
    shutil.copy(ROOT / "src" / "rlcore", clone / "src", follow_symlinks=False)
    code = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    built = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (pth,) = (name for name in archive.namelist() if name.endswith(".pth"))
        lines = archive.read(pth).decode().split()
    assert lines == [str(clone / "src")], "a plain path, which type checkers read too"
    # -S leaves the test's own installation out; the first entry of the path is the folder with the clone.
    code = f"import sys; sys.path += {lines!r}; import rlcore; print(rlcore.__version__)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert found.stdout.strip() == rlcore.__version__, found.stderr
