"""A process that shares nothing with the test but a pipe: it runs code it is sent, one JSON line each way."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(device_name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code prints must not stand among the answers
    import torch

    import rlcore
    from rlcore.types import EventHandle, IpcHandle

    names: dict[str, Any] = {
        "torch": torch,
        "os": os,
        "device": rlcore.get_device(device_name),
        "handle_of": lambda text: IpcHandle.from_bytes(bytes.fromhex(text)),
        "event_of": lambda text: EventHandle.from_bytes(bytes.fromhex(text)),
    }
    for line in sys.stdin:
        request = json.loads(line)
        names |= request["values"] | {"result": None}
        try:
            exec(request["code"], names)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        else:
            answer = {"result": names["result"]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
