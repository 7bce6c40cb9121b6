"""launcher="ray" over two machines made of Linux namespaces: own addresses, shared memory, process ids and boot ids."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import rlcore
from tests.engines.launchers.ray_faults import ENVIRONMENT
from tests.engines.train_batches import assert_same_weights, packed_batch
from tests.engines.train_policy import adamw_policy
from tests.hosts import ROOT, Host, start_hosts
from tests.warm import LIMIT_S

__all__ = ["start_hosts"]  # a fixture

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this file
pytestmark = [pytest.mark.ray, pytest.mark.hosts]

COMMON = """
    import contextlib, json, os, sys, time
    from pathlib import Path
    import torch
    import rlcore
    from rlcore.errors import RlcoreError
    from rlcore.nn import HuggingFaceTrainModule
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self):
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

        def nap(self, folder):
            Path(folder, f"{os.uname().nodename}.pid").write_text(str(os.getpid()))
            time.sleep(600)

    def loss(logprob, entropy, per_token):
        return -logprob * per_token["advantages"], {}

    folder, out = sys.argv[1:]
    with rlcore.meta_device():
        train = rlcore.TrainEngine(Policy.from_pretrained(folder))
    rlcore.init(address="10.77.0.1:6379")
"""

TRAIN = """
    batch = torch.load(f"{out}/batch.pt", weights_only=True)
    with train:
        train.build(data_parallel_size=2, num_hosts=2)
        found = {"devices": train.devices, "metrics": [train.train_batch(batch, loss) for _ in range(3)]}
        torch.save(train.state_dict(), f"{out}/state.pt")
    Path(out, "found.json").write_text(json.dumps(found))
"""

SYNC = """
    batch = torch.load(f"{out}/batch.pt", weights_only=True)
    with train, rlcore.InferenceEngine(folder) as infer, rlcore.InferenceEngine(folder) as shared:
        train.build(data_parallel_size=2, acceptable_node_ips=["10.77.0.1"])
        infer.build(devices="host-b/cpu:0")
        shared.build(devices="host-b/cpu:0")
        found = {"devices": [*train.devices, *infer.devices], "reports": []}
        for is_verified in (True, False):
            train.train_batch(batch, loss)
            report = train.sync_weights(infer, verify=is_verified)
            found["reports"].append([report.route, report.version, report.network_bytes, report.moved_bytes])
        greedy = {"max_tokens": 4, "temperature": 0.0}
        found["old"] = shared.generate([[1, 2, 3]], greedy)[0].outputs[0].logprobs
        found["new"] = infer.generate([[1, 2, 3]], greedy)[0].outputs[0].logprobs
        train.train_batch(batch, loss)
        try:
            train.sync_weights(infer, route="packed")
        except RlcoreError as error:
            found["packed"] = str(error)
    Path(out, "found.json").write_text(json.dumps(found))
"""

THREE = """
    batch = torch.load(f"{out}/batch.pt", weights_only=True)
    greedy = {"max_tokens": 4, "temperature": 0.0}
    samplers, alone = [rlcore.InferenceEngine(folder) for _ in range(3)], rlcore.InferenceEngine(folder)
    with contextlib.ExitStack() as closed:
        for engine in (train, *samplers, alone):
            closed.enter_context(engine)
        train.build(data_parallel_size=3, num_hosts=3)
        for device, sampler in zip(train.devices, samplers):
            sampler.build(devices=device)
        found = {"devices": train.devices, "reports": [], "served": []}
        for _ in range(2):
            train.train_batch(batch, loss)
            report = train.sync_weights(samplers, delta=True)
            found["reports"].append([report.route, report.is_delta, report.network_bytes, report.needed_bytes])
            served = [sampler.generate([[1, 2, 3]], greedy)[0] for sampler in samplers]
            found["served"].append([one.outputs[0].logprobs for one in served])
        alone.build(devices="host-c/cpu:1")
        train.sync_weights(alone, route="collective", verify=True)
        found["alone"] = alone.generate([[1, 2, 3]], greedy)[0].outputs[0].logprobs
    Path(out, "found.json").write_text(json.dumps(found))
"""

LOST = """
    train.build(data_parallel_size=2, num_hosts=2)
    began = time.monotonic()
    try:
        train.nap(out)
    except RlcoreError as error:
        found = {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    Path(out, "found.json").write_text(json.dumps(found))
    os._exit(0)
"""


def loss(logprob: torch.Tensor, entropy: Any, per_token: Any) -> Any:
    return -logprob * per_token["advantages"], {}


def ready(program: subprocess.Popen[str]) -> None:
    """Wait until ``ray start --block`` says that it has started."""
    assert program.stdout is not None
    for line in program.stdout:
        if "Ray runtime started" in line:
            return
    raise AssertionError(program.communicate()[1])


@pytest.fixture
def number_of_hosts() -> int:
    return 2


@pytest.fixture
def run(
    number_of_hosts: int, start_hosts: Any, tmp_path: Path, qwen2_folder: Path
) -> Iterator[Callable[..., dict[str, Any]]]:
    """``run(program)``: what a program on host-a writes, in a Ray cluster of host-a, host-b and perhaps host-c."""
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=2"]

    with start_hosts(number_of_hosts, also=[qwen2_folder]) as (here, there, *others):
        head = ["--head", "--include-dashboard=false"]
        for host in (here, there, *others):
            more = [*ray, *(head if host is here else [f"--address={here.address}:6379"])]
            named = [f"--node-name={host.name}", f"--node-ip-address={host.address}"]
            ready(host.start([*more, *named], environment=ENVIRONMENT))

        def run_there(text: str, beside: Callable[[Host], None] | None = None) -> dict[str, Any]:
            path = tmp_path / "program.py"
            path.write_text(textwrap.dedent(COMMON) + textwrap.dedent(text))
            program = here.python(str(path), str(qwen2_folder), str(tmp_path), environment=ENVIRONMENT)
            if beside is not None:
                beside(there)
            _, errors = program.communicate(timeout=LIMIT_S)
            assert (tmp_path / "found.json").exists(), errors
            found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
            return found

        yield run_there


def test_two_machines_train_as_one_does(
    run: Any, tmp_path: Path, qwen2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2ForCausalLM

    batch, policy = packed_batch(), adamw_policy(Qwen2ForCausalLM, lr=1e-2, eps=1e-3)
    torch.save(batch, tmp_path / "batch.pt")
    found = run(TRAIN)
    assert found["devices"] == ["host-a/cpu:0", "host-b/cpu:0"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with rlcore.meta_device():
        engine = rlcore.TrainEngine(policy.from_pretrained(qwen2_folder))
    with engine:
        engine.build(data_parallel_size=2, devices=["cpu:0", "cpu:1"], launcher="process")
        assert found["metrics"] == [engine.train_batch(batch, loss) for _ in range(3)]
        assert_same_weights(torch.load(tmp_path / "state.pt", weights_only=True), engine.state_dict())


def test_weights_go_from_machine_to_machine(run: Any, tmp_path: Path) -> None:
    torch.save(packed_batch(), tmp_path / "batch.pt")
    found = run(SYNC)
    assert found["devices"] == ["host-a/cpu:0", "host-a/cpu:1", "host-b/cpu:0"]
    for number, (route, version, network_bytes, moved_bytes) in enumerate(found["reports"], 1):
        assert (route, version) == ("collective", number)
        times = 2 if number == 1 else 1  # what is verified goes through the engine's own loader too
        assert network_bytes == times * moved_bytes > 0, "all of it goes to the other machine"
    assert found["new"] != found["old"]
    assert "route='packed'" in found["packed"] and "not supported" in found["packed"]


@pytest.mark.parametrize("number_of_hosts", [3])
def test_a_trainer_over_three_machines_gives_its_samplers_there_what_has_changed(run: Any, tmp_path: Path) -> None:
    """A rank and a sampler on each machine: ranks relay their shards, whole once and then as a delta."""
    torch.save(packed_batch(), tmp_path / "batch.pt")
    found = run(THREE)
    assert found["devices"] == [f"host-{letter}/cpu:0" for letter in "abc"]
    (first, *dense), (second, *delta) = ([route, *numbers] for route, *numbers in found["reports"])
    assert (first, second) == ("relayed", "relayed")
    assert [dense[0], delta[0]] == [False, True]
    for *_, network_bytes, needed_bytes in found["reports"]:
        share = network_bytes / needed_bytes
        assert 0 < share < 0.75, f"each machine takes the two thirds that it has not: {found['reports']}"
    for served in found["served"]:
        assert served == [served[0]] * 3, "all samplers serve the same weights"
    assert found["served"][0] != found["served"][1]
    assert found["alone"] == found["served"][1][0], "those that a whole sync, held against the engine's loader, brings"


SRUN = """
    import json, os, sys
    from pathlib import Path

    draft = Path(os.environ["SHARED"], "draft")
    draft.write_text(json.dumps([sys.argv[2:], dict(os.environ)]))
    draft.rename(draft.with_name("step"))
    os.execvpe(sys.argv[2], sys.argv[2:], os.environ | {"SLURM_NODEID": "0", "SLURMD_NODENAME": "host-a"})
"""

SCANCEL = """
    import os, sys

    print("ends", sys.argv[1], flush=True)
    os.kill(-1, 9)
"""

OTHER_NODE = """
    import json, os, sys, time
    from pathlib import Path

    while not (step := Path(sys.argv[1], "step")).exists():
        time.sleep(0.1)
    command, environment = json.loads(step.read_text())
    os.execvpe(command[0], command, environment | {"SLURM_NODEID": "1", "SLURMD_NODENAME": "host-b"})
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the script makes the cluster's token by openssl")
def test_the_script_for_slurm_on_the_page_runs_the_program_on_all_nodes(start_hosts: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text("utf-8")
    (script,) = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for tool, text in {"srun": SRUN, "scancel": SCANCEL}.items():
        (tmp_path / tool).write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
        (tmp_path / tool).chmod(0o755)
    program = ROOT / "examples" / "more_devices.py"
    found = script.replace("--train 16", "--train 2").replace("=--head ", '="--head --include-dashboard=false" ')
    found = found.replace("program.py", f"{program} --devices 2 --hosts 2 --steps 1 --address auto")
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"PATH": path, "SHARED": f"{tmp_path}", "SLURM_JOB_ID": "7", "RLCORE_DEVICE": "cpu"}
    settings["RLCORE_CACHE"] = str(tmp_path / "cache")
    with start_hosts(2) as (here, there):
        other = there.python("-c", textwrap.dedent(OTHER_NODE), str(tmp_path))
        printed, errors = here.start(["bash", "-c", found], environment=settings).communicate(timeout=LIMIT_S)
        other.kill()
    assert "trainer and samplers on host-a/cpu:0, host-b/cpu:0" in printed, errors
    assert re.search(r"^step  0 .* weights by relayed$", printed, re.MULTILINE)
    assert printed.endswith("ends 7\n")


@pytest.mark.parametrize("how", ["cut off", "stopped"])
def test_a_machine_that_does_not_answer_is_lost_within_seconds_and_ends_its_workers(
    run: Any, tmp_path: Path, how: str
) -> None:
    def lose(there: Host) -> None:
        pid = wait_for(tmp_path / "host-b.pid").read_text()
        is_there = f"test -d /proc/{pid} && echo yes || echo no"
        assert there.run(is_there) == "yes\n"
        if how == "cut off":
            there.cut()
        else:
            there.run("kill -STOP -1")  # all of its processes
            wait_for(tmp_path / "found.json")
            there.run("kill -CONT -1")
        deadline = time.monotonic() + LIMIT_S
        while there.run(is_there) == "yes\n":  # its agent hears nothing of the program any more
            assert time.monotonic() < deadline, f"a worker is left on the machine that was {how}"
            time.sleep(0.1)

    found = run(LOST, lose)
    assert found["kind"] == "WorkerDiedError"
    assert "rank 1 (host-b/cpu:0) was lost with its host host-b (it did not answer for 12 s)" in found["text"]
    assert found["seconds"] < 60, "Ray itself takes 64 s"


def wait_for(file: Path) -> Path:
    deadline = time.monotonic() + LIMIT_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, f"{file.name} has not come"
        time.sleep(0.1)
    return file
