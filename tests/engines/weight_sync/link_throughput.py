"""The throughput of a weight sync between two hosts, beside bare broadcasts of the same tensors on the same link.

    python -m tests.engines.weight_sync.link_throughput --layers 7 --megabits 1000

It makes two hosts of Linux namespaces (tests/hosts.py), and prints a line of JSON for each round. The weights have the
layout of Qwen2.5-1.5B or of Qwen3-30B-A3B with so many layers, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import rlcore
from tests.engines.weight_sync.far_ends import KEY
from tests.hosts import Host, hosts

LONGEST_S = 900.0
PORTS = "tcp://10.77.0.1:5000", "tcp://10.77.0.1:29500"


def dense(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of Qwen2.5-1.5B, whose head is its embedding."""
    yield from {"embed_tokens": (151936, 1536), "norm": (1536,)}.items()
    for number in range(layers):
        yield from _attention(number, hidden=1536, queries=1536, keys=256)
        for name, wide in (("q", 1536), ("k", 256), ("v", 256)):
            yield f"{number}.{name}_bias", (wide,)
        yield from _mlp(f"{number}", hidden=1536, inner=8960)


def experts(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of Qwen3-30B-A3B: 128 experts a layer, and a head of its own."""
    yield from {"embed_tokens": (151936, 2048), "lm_head": (151936, 2048), "norm": (2048,)}.items()
    for number in range(layers):
        yield from _attention(number, hidden=2048, queries=4096, keys=512)
        yield f"{number}.head_norms", (2, 128)
        yield f"{number}.router", (128, 2048)
        for expert in range(128):
            yield from _mlp(f"{number}.experts.{expert}", hidden=2048, inner=768)


def _attention(number: int, *, hidden: int, queries: int, keys: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in (
        ("q", (queries, hidden)),
        ("k", (keys, hidden)),
        ("v", (keys, hidden)),
        ("o", (hidden, queries)),
    ):
        yield f"{number}.{name}_proj", shape
    yield f"{number}.norms", (2, hidden)


def _mlp(prefix: str, *, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        yield f"{prefix}.{name}_proj", shape


LAYOUTS = {"1.5b": dense, "30b-a3b": experts}


def end(rank: int, model: str, layers: int, rounds: int) -> None:
    """Take the part of the sender (0) or of the receiver (1)."""
    held = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in LAYOUTS[model](layers)}
    limit = timedelta(seconds=LONGEST_S)
    dist.init_process_group("gloo", init_method=PORTS[1], rank=rank, world_size=2, timeout=limit)
    nbytes = sum(tensor.nbytes for tensor in held.values())
    if rank:
        receiver = rlcore.WeightReceiver(held, rlcore.connect_control(PORTS[0], key=KEY))
    else:
        sender = rlcore.WeightSender(held, rlcore.accept_controls(PORTS[0], 1, key=KEY))
    for number in range(rounds + 1):  # the first opens everything
        dist.barrier()
        if rank:
            receiver.receive(timeout_s=LONGEST_S)
        else:
            for tensor in held.values():
                tensor[:1] += 1
            seconds = sender.send(timeout_s=LONGEST_S).seconds
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
    numbers = ["--model", options.model, "--layers", str(options.layers), "--rounds", str(options.rounds)]
    return host.python(*module, *numbers, environment={"GLOO_SOCKET_IFNAME": "eth0"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=LAYOUTS, default="1.5b")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabits", type=int, default=0, help="the link's limit; 0: none")
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        end(options.rank, options.model, options.layers, options.rounds)
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
