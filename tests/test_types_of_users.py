"""A user's program against the installed wheel: mypy and pyright see rlcore's types (``py.typed``), and its mistake."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.clone import build, clone

pytestmark = pytest.mark.slow
PROGRAM = """\
import torch

import rlcore
from rlcore.ops import linear_logprob, ppo_clip


def step(train: rlcore.TrainEngine, infer: rlcore.InferenceEngine) -> dict[str, float]:
    outputs = infer.generate([[1, 2, 3]], {"max_tokens": 4})
    reveal_type(outputs)  # list[RequestOutput]
    batch = rlcore.collate(outputs, advantages=torch.ones(1))
    reveal_type(batch)  # dict[str, Any]
    metrics = train.train_batch(batch, ppo_clip())
    reveal_type(metrics)  # dict[str, float]
    reveal_type(train.sync_weights(infer))  # SyncReport
    hidden, weight, targets = torch.zeros(4, 8), torch.zeros(16, 8), torch.zeros(4, dtype=torch.int64)
    reveal_type(linear_logprob(hidden, weight, targets).logprob)  # Tensor
    metrics["loss"].upper()  # wrong
    return metrics
"""
WRONG = PROGRAM.splitlines().index('    metrics["loss"].upper()  # wrong') + 1
TYPES = re.findall(r"reveal_type\(.*\)  # (.*)", PROGRAM)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment with the wheel of this checkout, beside the packages of the test's own."""
    folder = tmp_path_factory.mktemp("environment")
    built = build(clone(folder / "copy"), "wheel", folder)
    made = [sys.executable, "-m", "venv", "--without-pip", str(folder / "env")]
    subprocess.run(made, check=True)
    (site,) = folder.glob("env/lib/python*/site-packages")
    with zipfile.ZipFile(built) as wheel:
        assert "rlcore/py.typed" in wheel.namelist(), "mypy reads no types of a package without it"
        wheel.extractall(site)
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "env"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_mypy_sees_the_types_and_the_mistake(environment: Path, program: Path) -> None:
    mypy = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={environment}/bin/python", program.name]
    told = subprocess.run(mypy, cwd=program.parent, capture_output=True, text=True, check=False).stdout
    revealed = re.findall(r'Revealed type is "(.*)"', told)
    assert [_short(text) for text in revealed] == TYPES, told
    assert re.findall(r"^program\.py:(\d+): error", told, re.MULTILINE) == [str(WRONG)]


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed: make test-slow")
def test_pyright_sees_the_types_and_the_mistake(environment: Path, program: Path) -> None:
    pyright = [sys.executable, "-m", "pyright", "--outputjson", f"--pythonpath={environment}/bin/python", program.name]
    done = subprocess.run(pyright, cwd=program.parent, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)["generalDiagnostics"]
    revealed = [re.findall(r'is "(.*)"', one["message"])[0] for one in told if one["severity"] == "information"]
    assert [_short(text) for text in revealed] == TYPES
    assert [one["range"]["start"]["line"] + 1 for one in told if one["severity"] == "error"] == [WRONG]


def _short(text: str) -> str:
    """Return the name of a type without those of its modules."""
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)
