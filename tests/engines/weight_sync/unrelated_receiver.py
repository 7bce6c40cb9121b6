"""A process of nobody's, or a thread: it takes weights into a module until its channel closes, and says what it has."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from channel import SocketControl
from torch import nn

import rlcore
from rlcore.errors import SyncError
from rlcore.process.framing import take_standard_output


def write_line(to: IO[bytes], said: dict[str, Any]) -> None:
    to.write(json.dumps(said).encode() + b"\n")
    to.flush()


def receive(path: str, say: Callable[[dict[str, Any]], None], device: str = "cpu") -> None:
    deadline = time.monotonic() + 100
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens at {path}")
        time.sleep(0.01)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 3, bias=False)).to(device, torch.bfloat16)
    control = SocketControl.connect(Path(path))
    receiver = rlcore.WeightReceiver(model, control)
    while True:
        try:
            version = receiver.receive(timeout_s=100)
        except SyncError as error:
            say({"error": str(error), "is_whole": receiver.is_whole})
            if "is gone" in str(error):
                control.close()
                return
            continue
        sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
        say({"version": version, "sums": sums, "is_whole": receiver.is_whole})


if __name__ == "__main__":
    answers = take_standard_output()  # torch 2.10's gloo prints there
    receive(sys.argv[1], lambda said: write_line(answers, said), *sys.argv[2:])
