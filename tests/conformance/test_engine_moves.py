"""An engine on a third party's device: its moves by the names of devices, from simdev and back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.warm import LIMIT_S

MOVES = """
import json, sys, torch, rlcore
from transformers import Qwen2Config, Qwen2ForCausalLM
from rlcore.errors import InvalidInputError
from rlcore.nn import HuggingFaceTrainModule

class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
    pass

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(sys.argv[1])
with rlcore.meta_device():
    module = Policy.from_pretrained(sys.argv[1])
memory = rlcore.get_device("simdev").memory
found = []
with rlcore.TrainEngine(module).build(devices="simdev:0", launcher="inline") as engine:
    state = engine.state_dict()
    for name in ("cpu", "simdev", "cpu", "cuda", "meta"):
        engine.to(name, "weights")
        found.append([name, engine.state["weights"], memory.stats().allocated_bytes])
        if name == "simdev":
            same = all(torch.equal(state[name], tensor) for name, tensor in engine.state_dict().items())
    try:
        engine.to("simdev:1", "weights")
    except InvalidInputError as error:
        refused = str(error)
print(json.dumps([found, same, refused]))
"""


@pytest.mark.slow  # an environment with a third party's distribution is made for it
def test_to_takes_the_name_of_a_third_partys_device(simdev_python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [simdev_python, "-c", MOVES, tmp_path / "model"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found, same, refused = json.loads(done.stdout.splitlines()[-1])
    assert [state for _, state, _ in found] == ["offloaded", "loaded", "offloaded", "loaded", "released"]
    away, here = found[0][2], found[1][2]
    assert away < here, "the weights have left the device"
    assert [used for *_, used in found] == [away, here, away, here, away]
    assert same, "and have come back as they were"
    assert "the devices themselves are those of build(devices=...); got 'simdev:1'" in refused
