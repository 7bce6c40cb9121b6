"""One rank of a trainer that is sharded over hosts, with a receiver of its own in the same process.

RANK=0 WORLD_SIZE=4 MASTER_ADDR=... MASTER_PORT=... python -m tests.engines.weight_sync.colocated_ranks \\
    '{"num_elements": 1000, "rounds": [{}], "timeout_s": 60}'

It prints a line of JSON for each round, and ends after one that failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rlcore
from rlcore.errors import RlcoreError
from rlcore.process.framing import take_standard_output
from tests.engines.weight_sync.far_ends import digest, weights


def change(tensors: dict[str, Tensor], sharded: dict[str, Any], step: int, rank: int) -> None:
    """Change one element in a hundred, alike in the whole tensors and in this rank's rows of them."""
    for name, tensor in tensors.items():
        rows = sharded[name].to_local()
        tensor[step::100] += 1
        first = sum(len(part) for part in tensor.chunk(dist.get_world_size())[:rank])
        rows.copy_(tensor[first : first + len(rows)])


def main() -> None:
    answers = take_standard_output()  # torch 2.10's gloo prints there
    wanted = json.loads(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=wanted["timeout_s"]))
    mesh = init_device_mesh("cpu", (size,))
    whole = weights(wanted["num_elements"], 1)
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    held = weights(wanted["num_elements"], 0)
    receiver = rlcore.WeightReceiver(held)
    sender = rlcore.WeightSender(sharded, receiver)

    def say(**facts: Any) -> None:
        answers.write(json.dumps(facts).encode() + b"\n")
        answers.flush()

    for step, options in enumerate(wanted["rounds"], 1):
        if step > 1:
            change(whole, sharded, step, rank)
        started = time.monotonic()
        try:
            report = sender.send(**options)
        except (RlcoreError, RuntimeError) as error:  # RuntimeError: of torch's own group
            found = {"error": str(error), "is_whole": receiver.is_whole, "version": receiver.version}
            say(**found, digest=digest(held), seconds=time.monotonic() - started)
            os._exit(0)  # the groups have failed: there is nobody to take leave of
        say(
            route=report.route,
            is_delta=report.is_delta,
            why_dense=report.why_dense,
            network_bytes=report.network_bytes,
            moved_bytes=report.moved_bytes,
            is_equal=digest(held) == digest(whole),
            digest=digest(held),
            seconds=report.seconds,
        )
    sender.close()
    receiver.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
