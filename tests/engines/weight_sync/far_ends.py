"""A sender and a receiver as two programs that share an address and a key, and perhaps nothing else.

    python -m tests.engines.weight_sync.far_ends sender '{"address": "tcp://10.77.0.1:5000", "rounds": [{}]}'
    python -m tests.engines.weight_sync.far_ends receiver '{"address": "tcp://10.77.0.1:5000"}'

Each prints a line of JSON for each round, and ends after one that failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

import rlcore
from rlcore.engines.weight_sync import receiver as receiver_module
from rlcore.errors import RlcoreError
from rlcore.process.framing import take_standard_output

KEY = b"a key that both ends know"


def weights(num_elements: int, version: int) -> dict[str, Tensor]:
    """The weights of a version: of version 0 other ones than of every later one."""
    generator = torch.Generator().manual_seed(version)
    return {
        "large": torch.randn(num_elements, generator=generator),
        "small": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
    }


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest of all bytes of all tensors."""
    found = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def send(wanted: dict[str, Any], say: Any) -> None:
    num_elements = wanted.get("num_elements", 1000)
    held = weights(num_elements, 0)
    controls = rlcore.accept_controls(wanted["address"], wanted.get("num_receivers", 1), key=KEY)
    sender = rlcore.WeightSender(held, controls)
    for version, options in enumerate(wanted["rounds"], 1):
        every = options.pop("every", 100)
        if options.get("delta") and version > 1:
            held["large"][version::every] += 1
        else:
            for name, tensor in weights(num_elements, version).items():
                held[name].copy_(tensor)
        started = time.monotonic()
        try:
            report = sender.send(version=version, **options)
        except RlcoreError as error:
            say(error=str(error), seconds=time.monotonic() - started)
            continue
        say(
            route=report.route,
            digest=digest(held),
            moved_bytes=report.moved_bytes,
            network_bytes=report.network_bytes,
            is_delta=report.is_delta,
            why_dense=report.why_dense,
            seconds=report.seconds,
        )
    sender.close()
    for control in controls:
        control.close()


def receive(wanted: dict[str, Any], say: Any) -> None:
    held = weights(wanted.get("num_elements", 1000), 0)
    if "kind" in wanted:  # its device says so of itself
        own = receiver_module.endpoint_info
        receiver_module.endpoint_info = lambda device: msgspec.structs.replace(own(device), device=wanted["kind"])
    control = rlcore.connect_control(wanted["address"], key=KEY)
    receiver = rlcore.WeightReceiver(held, control)
    error = ""
    while "the sender is gone" not in error:
        started = time.monotonic()
        try:
            version: int | None = receiver.receive(timeout_s=wanted.get("timeout_s", 100))
            error = ""
        except RlcoreError as raised:
            version, error = receiver.version, str(raised)
        seconds = time.monotonic() - started
        say(version=version, digest=digest(held), is_whole=receiver.is_whole, error=error, seconds=seconds)
    receiver.close()
    control.close()


def main() -> None:
    answers = take_standard_output()  # torch 2.10's gloo prints there

    def say(**facts: Any) -> None:
        answers.write(json.dumps(facts | {"pid": os.getpid()}).encode() + b"\n")
        answers.flush()

    {"sender": send, "receiver": receive}[sys.argv[1]](json.loads(sys.argv[2]), say)


if __name__ == "__main__":
    main()
