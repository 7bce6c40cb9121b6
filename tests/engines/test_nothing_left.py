"""Files and shared memory after engines of every kind were closed: nothing of them is left."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlcore.process.status import maker_of_shared_memory

PROGRAM = """
import os, pathlib, sys
import torch, rlcore
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip
from transformers import Qwen2ForCausalLM

model, work = map(pathlib.Path, sys.argv[1:])
BATCH = {
    "input_ids": torch.randint(20, (4, 12)),
    "old_logprobs": torch.full((4, 12), -3.0),
    "advantages": torch.tensor([1.0, -1.0, 0.5, 2.0]),
}

class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
    def process(self):
        return os.getpid()

def use(train_at, infer_at, routes, is_train_first):
    with rlcore.meta_device():
        train = rlcore.TrainEngine(Policy.from_pretrained(model)).build(**train_at)
    infer = rlcore.InferenceEngine(model, executor="hf").build(**infer_at)
    workers = [worker.process_id for engine in (train, infer) for worker in engine.executors[0].workers]
    train.train_batch(BATCH, ppo_clip())
    train.save(work / "checkpoint")
    train.export(work / "export")
    train.offload()
    train.onload()
    for route in routes:
        train.train_batch(BATCH, ppo_clip())
        assert train.sync_weights(infer, route=route).route == route
    infer.offload()
    infer.onload()
    infer.generate([[1, 2, 3]])
    train.save(work / "checkpoint", blocking=False)
    for engine in (train, infer) if is_train_first else (infer, train):
        engine.close()
    found = sorted(path.name for path in pathlib.Path(os.environ["RLCORE_RUNTIME"]).iterdir())
    own = [name for name in found if name.startswith(f"ipc-{os.getpid()}-")]  # of this program, as long as it runs
    print(*workers, *[name for name in found if name not in own], flush=True)

two = {"devices": ["cpu:0", "cpu:1"], "data_parallel_size": 2}
for is_train_first in (True, False):
    use({"devices": "cpu:0"}, {"devices": "cpu:0"}, ["local"], is_train_first)
    use({"devices": "cpu:0"}, {"devices": "cpu:1", "launcher": "process"}, ["packed"], is_train_first)
    use(two, {"devices": "cpu:2", "launcher": "process"}, ["packed", "collective"], is_train_first)
"""


@pytest.mark.slow
def test_nothing_is_left_of_closed_engines(qwen2_folder: Path, tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("RLCORE_RUNTIME", "RLCORE_CACHE", "TMPDIR", "work", "here")}
    for place in places.values():
        place.mkdir(mode=0o700)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    environment = {name: str(place) for name, place in places.items() if name.isupper()}
    done = subprocess.run(
        [sys.executable, str(program), str(qwen2_folder), str(places["work"])],
        env=os.environ | environment | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
        cwd=places["here"], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 6
    assert [name for line in lines for name in line if not name.isdecimal()] == [], "in the runtime folder, once closed"
    for name in ("RLCORE_RUNTIME", "RLCORE_CACHE", "TMPDIR", "here"):
        assert list(places[name].iterdir()) == [], name
    assert sorted(path.name for path in places["work"].iterdir()) == ["checkpoint", "export"]
    assert len(list((places["work"] / "checkpoint").iterdir())) == 2, "manifest and data"
    workers = {int(name) for line in lines for name in line if name.isdecimal()}
    assert not [name for name in os.listdir("/dev/shm") if maker_of_shared_memory(name) in workers]
