"""docs/plugins.md runs: its files are written, its commands give the output that the page shows."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.devices.ipc.sharing import Sharing
from rlcore.devices.memory import TorchMemory
from tests import warm_process
from tests.warm import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "plugins.md"
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

    def follow(self, text: str, *, is_read: bool = False) -> int:
        """Write the files and run the commands, whose number is returned; of what is only read there are the files."""
        number = 0
        for block in _BLOCK.finditer(text):
            if block["path"]:
                file = self._folder / block["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block["text"])
            elif block["language"] == "console" and not is_read:
                for command, expected in commands(block["text"]):
                    self._run(command, expected)
                    number += 1
        return number

    def _run(self, command: str, expected: str) -> None:
        settings = {"PATH": self._path, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
        if "-executor " in command:  # a suite whose engines start many workers: forks, which need room for variables
            settings |= warm_process.room()
            settings["PYTEST_ADDOPTS"] += " -p warm_suite"
            settings["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "conformance"), str(ROOT)])
        found = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        is_as_shown = doctest.OutputChecker().check_output(expected, found.stdout, options)
        assert is_as_shown, f"$ {command}\n{found.stdout}\nand not\n{expected}"


@pytest.mark.slow
@pytest.mark.timeout(900)  # together minutes: the file begins early
@pytest.mark.parametrize(("part", "num_commands"), [(0, 8), (1, 5), (2, 3)], ids=["device", "sampler", "trainer"])
def test_the_tutorial(tmp_path: Path, part: int, num_commands: int) -> None:
    """Each part that writes one class, with the files of those before it."""
    parts = re.split(r"^(?=## [68]\. )", PAGE.read_text(), flags=re.MULTILINE)
    assert len(parts) == 3
    reader = Reader(tmp_path)
    reader.follow("".join(parts[:part]), is_read=True)
    assert reader.follow(parts[part]) == num_commands


def test_output_that_differs_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"Acme One\s+and not\s+Acme Two"):
        Reader(tmp_path).follow("```console\n$ echo Acme One\nAcme Two\n```\n")


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="this interpreter is in no virtual environment")
def test_the_reader_does_not_write_into_this_environment(tmp_path: Path) -> None:
    assert Reader(tmp_path).follow(f"```console\n$ python -c 'import sys; print(sys.prefix)'\n{tmp_path}/venv\n```\n")


def test_the_signatures_on_the_page_are_those_of_the_base_classes() -> None:
    (block,) = [found["text"] for found in _BLOCK.finditer(PAGE.read_text()) if "class AcmeSharing(" in found["text"]]
    bases = {"AcmeSharing": Sharing, "AcmeMemory": TorchMemory}
    compared = []
    for node in ast.parse(block).body:
        assert isinstance(node, ast.ClassDef)
        for shown in node.body:
            if isinstance(shown, ast.FunctionDef):
                own = inspect.signature(getattr(bases[node.name], shown.name))
                assert [one.arg for one in shown.args.args] == list(own.parameters), shown.name
                annotations = [ast.unparse(one.annotation) for one in shown.args.args if one.annotation]
                assert annotations == [one.annotation for one in list(own.parameters.values())[1:]], shown.name
                assert shown.returns and ast.unparse(shown.returns) == own.return_annotation, shown.name
                compared.append(shown.name)
    assert compared == ["share", "open", "close", "host_alloc", "_copy"]
