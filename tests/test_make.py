"""`make` says what is wrong with the interpreter that it was given, and leaves nothing half made."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INTERPRETER = """#!/bin/sh
case "$*" in
--version) echo "Python 3.14.9" ;;
"-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*pip*) exit 1 ;;  # it finds no torch
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(INTERPRETER)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(clone: Path, *arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", *arguments], cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout
    return done.stderr.partition("\nmake: ")[0]


def test_an_interpreter_that_is_not_there_is_named(clone: Path) -> None:
    (clone / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(clone / "python", clone / ".venv" / "bin")
    told = make(clone, "test", "PYTHON=python3.99")
    assert told == "python3.99 does not run: install it, or use make PYTHON=..."


def test_where_there_is_no_torch_the_environment_just_made_goes_and_another_stays(clone: Path) -> None:
    for is_new in (True, False):
        if not is_new:
            (clone / ".venv" / "bin").mkdir(parents=True)
            shutil.copy(clone / "python", clone / ".venv" / "bin")
        told = make(clone, "test", "PYTHON=./python")
        assert told.startswith("pip finds no torch==") and "for Python 3.14.9 on this machine" in told
        assert (clone / ".venv").exists() != is_new


def test_a_folder_with_a_letter_beyond_ascii_is_read_in_the_locale_c(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(clone, clone / "Zürich"))
    (folder / "python").write_text(INTERPRETER.replace("exit 1 ;;", 'echo "pip reads $LC_ALL" >&2; exit 1 ;;'))
    monkeypatch.setenv("LC_ALL", "C")
    assert make(folder, "test", "PYTHON=./python").startswith("pip reads C.UTF-8\npip finds no torch==")
