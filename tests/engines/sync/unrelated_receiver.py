"""A process of nobody's: it takes weights into a module until its channel closes, and says what it has."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from channel import SocketControl
from torch import nn

import rlcore
from rlcore.errors import SyncError


def main(path: str, device: str = "cpu") -> None:
    while not Path(path).exists():
        time.sleep(0.01)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 3, bias=False)).to(device, torch.bfloat16)
    receiver = rlcore.WeightReceiver(model, SocketControl.connect(Path(path)))
    while True:
        try:
            version = receiver.receive(timeout_s=100)
        except SyncError as error:
            print(json.dumps({"error": str(error), "is_whole": receiver.is_whole}), flush=True)
            if "is gone" in str(error):
                return
            continue
        sums = [float(parameter.double().sum()) for parameter in model.parameters()]
        print(json.dumps({"version": version, "sums": sums, "is_whole": receiver.is_whole}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
