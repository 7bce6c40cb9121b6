"""A disk that fills up: a small file system, mounted where no other process sees it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.warm import LIMIT_S

ALONE = ["unshare", "--user", "--map-root-user", "--mount"]

PROGRAM = """
import json, pathlib, sys
import rlcore
from rlcore.errors import CheckpointError
from rlcore.nn import HuggingFaceTrainModule
import torch
from transformers import Qwen2ForCausalLM

model, disk, what = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
PAGES = 8 * 4096

class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

def names():
    return sorted(str(path.relative_to(disk)) for path in disk.rglob("*"))

def fill(room):
    # The disk has so many bytes left.
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            filler.truncate(filler.tell() - room)

with rlcore.meta_device():
    module = Policy.from_pretrained(model)
with rlcore.TrainEngine(module) as engine:
    engine.build(devices="cpu")
    weights = engine.state_dict()
    engine.save(disk / "checkpoint", {"step": 1})
    engine.export(disk / "model")
    act = {
        "save": lambda: engine.save(disk / "checkpoint", {"step": 2}),
        "save in the background": lambda: engine.save(disk / "checkpoint", {"step": 2}, blocking=False).result(),
        "export": lambda: engine.export(disk / "model"),
    }[what]
    tries = []
    while True:
        engine.load_state_dict({name: value + 1 for name, value in weights.items()})
        (disk / "filler").touch()
        before = names()
        fill(PAGES * len(tries))
        try:
            act()
        except CheckpointError as error:
            extra, is_same = engine.load(disk / "checkpoint"), True
            for name, value in engine.state_dict().items():
                is_same = is_same and torch.equal(value, weights[name])
            tries.append([str(error), extra["step"], is_same, names() == before])
        else:
            break
        (disk / "filler").unlink()
    print(json.dumps([tries, engine.load(disk / "checkpoint")["step"], names()]))
"""


def on_a_small_disk(folder: Path, size: str, program: str, *arguments: object) -> Any:
    """Run a program that sees a file system of ``size`` in ``folder``; return what it prints."""
    mount = f"mount -t tmpfs -o size={size} none {folder}"
    if subprocess.run([*ALONE, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("needs a user namespace in which a small file system can be mounted (unshare --user --mount)")
    script = folder.with_name("program.py")
    script.write_text(textwrap.dedent(program))
    command = [*ALONE, "sh", "-c", f'{mount} && exec "$0" "$@"', sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("save", "cannot write the checkpoint {disk}/checkpoint: .*No space left on device.*; the previous .* intact"),
        (
            "save in the background",
            "cannot write the checkpoint {disk}/checkpoint: .*No space left on device.*; the previous .* intact",
        ),
        ("export", "cannot write the model to {disk}/model: .*No space left on device"),
    ],
    ids=["save", "background", "export"],
)
def test_wherever_a_disk_is_full_the_earlier_files_are_whole_and_nothing_is_left(
    qwen2_folder: Path, tmp_path: Path, what: str, told: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    tries, step, names = on_a_small_disk(disk, "2m", PROGRAM, qwen2_folder, disk, what)
    assert len(tries) > 3, "full before the first file, within it and after"
    for error, loaded, is_same, nothing_is_left in tries:
        assert re.match(told.format(disk=disk), error)
        assert (loaded, is_same, nothing_is_left) == (1, True, True), error
    assert step == (1 if what == "export" else 2)
    assert len([name for name in names if name.startswith("checkpoint/data-") and name.count("/") == 1]) == 1
    assert not [name for name in names if "/." in f"/{name}"]
