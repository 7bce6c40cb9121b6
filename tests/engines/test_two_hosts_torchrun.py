"""launcher="torchrun" over two hosts: the results are those of one, and weights stay on the host where they are."""

from __future__ import annotations

import json
import textwrap
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.ops import ppo_clip
from tests.hosts import Host, start_hosts, two_hosts
from tests.warm import LIMIT_S

from .plain_training import assert_metrics
from .train_batches import packed_batch
from .train_policy import truth_of

__all__ = ["start_hosts", "two_hosts"]  # fixtures

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

POLICY = """
    import json, os, socket, sys
    from pathlib import Path
    import torch
    import rlcore
    from rlcore.errors import RlcoreError
    from rlcore.nn import HuggingFaceTrainModule
    from rlcore.ops import ppo_clip
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self):
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

        @torch.no_grad()
        def add(self, amount):
            for parameter in self.parameters():
                parameter.add_(amount)

    folder, out = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with rlcore.meta_device():
        module = Policy.from_pretrained(folder)
"""

TRAIN = """
    batch = torch.load(f"{out}/batch.pt", weights_only=True)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu", data_parallel_size=size, launcher="torchrun")
        metrics = [engine.train_batch(batch, ppo_clip()) for _ in range(2)]
        found = {"metrics": metrics, "logprobs": engine.forward_logprobs(batch), "state": engine.state_dict()}
    torch.save(found, f"{out}/{rank}.pt")
    Path(out, f"{rank}.txt").write_text(socket.gethostname())
"""

SYNC = """
    def sent_bytes():
        return int(Path("/run/sys/class/net/eth0/statistics/tx_bytes").read_text())

    replicas = int(os.environ["REPLICAS"])
    with rlcore.TrainEngine(module) as train, rlcore.InferenceEngine(folder) as infer:
        train.build(devices=["cpu:0", "cpu:1"], data_parallel_size=size // replicas, replicas=replicas,
                    launcher="torchrun")
        infer.build(devices="cpu", launcher="torchrun")
        found = {"routes": [], "errors": [], "sent": [], "network": [], "moved": []}
        for version in (1, 2):
            train.add(0.01)
            before = sent_bytes()
            try:
                report = train.sync_weights(infer, timeout_s=100)
            except RlcoreError as error:
                found["errors"].append(str(error))
                continue
            found["sent"].append(sent_bytes() - before)
            found["routes"].append(report.route)
            found["network"].append(report.network_bytes)
            found["moved"].append(report.moved_bytes)
        state = train.state_dict()
        served = dict(infer.executors[0].workers[0].worker.module.named_parameters())
        found["is_equal"] = all(torch.equal(served[name], tensor) for name, tensor in state.items())
        found["state"] = infer.sync_state
    Path(out, f"{rank}.json").write_text(json.dumps(found))
"""


def torchrun(
    hosts: list[Host], program: str, arguments: list[object], folder: Path, *, ranks_each: int = 1, **environment: str
) -> None:
    """Run a program on both hosts, whose names nobody can look up; all ranks must succeed."""
    script = folder / "script.py"
    # An interpreter that ends by itself here was aborted in 8 of 49 runs, after the last line: docs/engines.md.
    script.write_text(textwrap.dedent(POLICY) + textwrap.dedent(program) + "os._exit(0)\n")
    started = [
        host.python(
            *["-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--node-rank", str(number)],
            *["--nproc-per-node", str(ranks_each), "--master-addr", hosts[0].address, "--master-port", "29500"],
            *[str(script), *map(str, arguments)],
            environment={"PYTHONFAULTHANDLER": "1", **environment},  # a rank that aborts says where
        )
        for number, host in enumerate(hosts)
    ]
    with ThreadPoolExecutor(len(started)) as pool:
        ends = {pool.submit(one.communicate): one for one in started}
        for end in as_completed(ends, timeout=LIMIT_S):
            if ends[end].returncode:
                for one in started:  # they would wait minutes for the one that failed
                    one.kill()
                pytest.fail(end.result()[1])


def test_a_step_over_two_hosts_is_that_of_one(
    policy: Any, qwen2_folder: Path, tmp_path: Path, start_hosts: Any
) -> None:
    class Policy(policy):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    batch = packed_batch((12, 3, 7, 2, 19))
    torch.save(batch, tmp_path / "batch.pt")
    with start_hosts(2, also=[qwen2_folder]) as hosts:
        torchrun(hosts, TRAIN, [qwen2_folder, tmp_path], tmp_path)
    truth = truth_of(Policy, qwen2_folder)
    steps = [truth.step(batch, ppo_clip()) for _ in range(2)]
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for metrics, step in zip(found["metrics"], steps, strict=True):
            assert_metrics(metrics, *step)
        truth.assert_logprobs(found["logprobs"], batch)
        truth.assert_weights(found["state"])
    names = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert names == ["host-a", "host-b"]


@pytest.fixture
def larger_folder(write_checkpoint: Any, tiny_config: dict[str, Any]) -> Path:
    """A model whose weights are many times what a round has of messages."""
    from transformers import Qwen2Config

    return write_checkpoint(Qwen2Config(**tiny_config | {"hidden_size": 256, "intermediate_size": 1024}))


def test_with_a_replica_on_each_host_weights_stay_there(larger_folder: Path, tmp_path: Path, start_hosts: Any) -> None:
    with start_hosts(2, also=[larger_folder]) as hosts:
        torchrun(hosts, SYNC, [larger_folder, tmp_path], tmp_path, ranks_each=2, REPLICAS="2")
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["routes"] == ["packed", "packed"], found["errors"]
        assert found["network"] == [0, 0]
        assert found["is_equal"] and found["state"] == "serving"
        assert max(found["sent"]) < 0.1 * min(found["moved"]) / 4, found


def test_shards_on_two_hosts_are_relayed_and_cross_the_network_once(
    larger_folder: Path, tmp_path: Path, start_hosts: Any
) -> None:
    with start_hosts(2, also=[larger_folder]) as hosts:
        torchrun(hosts, SYNC, [larger_folder, tmp_path], tmp_path, ranks_each=2, REPLICAS="1")
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["routes"] == ["relayed", "relayed"], found["errors"]
        assert found["is_equal"] and found["state"] == "serving"
        for network, moved, sent in zip(found["network"], found["moved"], found["sent"], strict=True):
            assert network == moved / 4, "each host's half goes to the other, whose two samplers share it"
            assert 0.3 * network < sent < 0.8 * network, found
