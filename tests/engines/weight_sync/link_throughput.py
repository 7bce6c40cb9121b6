"""The throughput of a weight sync between two hosts, beside bare broadcasts of the same tensors on the same link.

    python -m tests.engines.weight_sync.link_throughput --layers 7 --megabits 1000

It makes two hosts of Linux namespaces (tests/hosts.py), and prints a line of JSON for each round. The weights have the
layout of Qwen2.5-1.5B with so many layers, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import rlcore
from tests.engines.weight_sync.far_ends import KEY
from tests.hosts import Host, hosts

HIDDEN, INNER, KEYS, VOCABULARY = 1536, 8960, 256, 151936
PORTS = "tcp://10.77.0.1:5000", "tcp://10.77.0.1:29500"


def layout(layers: int) -> dict[str, Tensor]:
    """Return weights of the layout of Qwen2.5-1.5B, whose head is its embedding."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for number in range(layers):
        shapes |= {
            f"{number}.q_proj": (HIDDEN, HIDDEN),
            f"{number}.q_bias": (HIDDEN,),
            f"{number}.k_proj": (KEYS, HIDDEN),
            f"{number}.k_bias": (KEYS,),
            f"{number}.v_proj": (KEYS, HIDDEN),
            f"{number}.v_bias": (KEYS,),
            f"{number}.o_proj": (HIDDEN, HIDDEN),
            f"{number}.gate_proj": (INNER, HIDDEN),
            f"{number}.up_proj": (INNER, HIDDEN),
            f"{number}.down_proj": (HIDDEN, INNER),
            f"{number}.norms": (2, HIDDEN),
        }
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def end(rank: int, layers: int, rounds: int) -> None:
    """Take the part of the sender (0) or of the receiver (1)."""
    held = layout(layers)
    dist.init_process_group("gloo", init_method=PORTS[1], rank=rank, world_size=2, timeout=timedelta(seconds=300))
    nbytes = sum(tensor.nbytes for tensor in held.values())
    if rank:
        receiver = rlcore.WeightReceiver(held, rlcore.connect_control(PORTS[0], key=KEY))
    else:
        sender = rlcore.WeightSender(held, rlcore.accept_controls(PORTS[0], 1, key=KEY))
    for number in range(rounds + 1):  # the first opens everything
        dist.barrier()
        if rank:
            receiver.receive(timeout_s=300)
        else:
            for tensor in held.values():
                tensor[:1] += 1
            seconds = sender.send(timeout_s=300).seconds
        dist.barrier()
        started = time.perf_counter()
        for tensor in held.values():
            dist.broadcast(tensor, 0)
        dist.barrier()
        broadcast = time.perf_counter() - started
        if not rank and number:
            speeds = {"sync_MBps": nbytes / seconds / 1e6, "broadcast_MBps": nbytes / broadcast / 1e6}
            print(json.dumps({"nbytes": nbytes, "share": broadcast / seconds} | speeds), flush=True)
    dist.destroy_process_group()


def start(host: Host, rank: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    module = ["-m", "tests.engines.weight_sync.link_throughput", "--rank", str(rank)]
    numbers = ["--layers", str(options.layers), "--rounds", str(options.rounds)]
    return host.python(*module, *numbers, environment={"GLOO_SOCKET_IFNAME": "eth0"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabits", type=int, default=0, help="the link's limit; 0: none")
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        end(options.rank, options.layers, options.rounds)
        return
    with tempfile.TemporaryDirectory() as shared, hosts(2, Path(shared)) as made:
        if options.megabits:
            made[0].limit(options.megabits)
        ends = [start(host, rank, options) for rank, host in enumerate(made)]
        for one in ends:
            out, error = one.communicate()
            sys.stdout.write(out)
            if one.returncode:
                sys.exit(error)


if __name__ == "__main__":
    main()
