"""An editable installation from a clone, and the wheel, built without an index from a copy of what the build reads."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import rlcore
from tests.clone import build, clone


@pytest.mark.slow
def test_an_editable_install_is_found_from_the_folder_in_which_the_clone_lies(tmp_path: Path) -> None:
    copy = clone(tmp_path / "rlcore")
    with zipfile.ZipFile(build(copy, "editable", tmp_path)) as archive:
        (pth,) = (name for name in archive.namelist() if name.endswith(".pth"))
        lines = archive.read(pth).decode().split()
    assert lines == [str(copy / "src")], "a plain path, which type checkers read too"
    # -S leaves the test's own installation out; the first entry of the path is the folder with the clone.
    code = f"import sys; sys.path += {lines!r}; import rlcore; print(rlcore.__version__)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert found.stdout.strip() == rlcore.__version__, found.stderr
