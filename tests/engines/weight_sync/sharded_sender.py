"""A sender on every rank of torchrun's world, of weights that the ranks hold by rows; rank 0 has the channel.

torchrun ... sharded_sender.py tcp://10.77.0.3:5000 out
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rlcore
from tests.engines.weight_sync.far_ends import KEY, digest, weights


def main() -> None:
    address, out = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (size,))
    whole = weights(1000, 1)
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    controls = rlcore.accept_controls(address, 1, key=KEY) if rank == 0 else []
    sender = rlcore.WeightSender(sharded, controls)
    found = []
    for version in (1, 2):
        report = sender.send(version=version, route="collective", verify=version == 2, timeout_s=100)
        found.append([report.route, report.moved_bytes, report.network_bytes])
        for tensor in sharded.values():
            tensor.to_local().add_(1)
    digests = [digest(whole), digest({name: tensor + 1 for name, tensor in whole.items()})]
    Path(out, f"sender-{rank}.json").write_text(json.dumps([found, digests]))
    sender.close()
    for control in controls:
        control.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
