"""docs/plugins.md runs: its files are written, its commands give the output that the page shows."""

from __future__ import annotations

import doctest
import os
import re
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugins.md"
_BLOCK = re.compile(r"(?:^`(?P<path>\S+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, and the output that follows it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


class Reader:
    """Somebody who follows the page in a folder and a virtual environment of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = folder / "venv"
        venv.create(environment, symlinks=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!a})\n" for path in site.getsitepackages() if Path(path).is_dir()]
        (packages / "parent.pth").write_text("".join(lines))
        self._path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def follow(self, text: str) -> int:
        """Number of commands run."""
        number = 0
        for block in _BLOCK.finditer(text):
            if block["path"]:
                file = self._folder / block["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block["text"])
            elif block["language"] == "console":
                for command, expected in commands(block["text"]):
                    self._run(command, expected)
                    number += 1
        return number

    def _run(self, command: str, expected: str) -> None:
        found = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=os.environ | {"PATH": self._path, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        is_as_shown = doctest.OutputChecker().check_output(expected, found.stdout, options)
        assert is_as_shown, f"$ {command}\n{found.stdout}\nand not\n{expected}"


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path) -> None:
    assert Reader(tmp_path).follow(PAGE.read_text()) == 16


def test_output_that_differs_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"Acme One\s+and not\s+Acme Two"):
        Reader(tmp_path).follow("```console\n$ echo Acme One\nAcme Two\n```\n")


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="this interpreter is in no virtual environment")
def test_the_reader_does_not_write_into_this_environment(tmp_path: Path) -> None:
    assert Reader(tmp_path).follow(f"```console\n$ python -c 'import sys; print(sys.prefix)'\n{tmp_path}/venv\n```\n")
