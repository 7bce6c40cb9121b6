"""A check that shares memory of a device with another process.

The other process (``ImportingProcess``) starts early, because it must import torch too.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rlcore.doctor.check import CheckVerdict, fail, ok, warn
from rlcore.errors import UnsupportedError
from rlcore.process.framing import read_message, take_standard_output, write_message
from rlcore.process.message_child import MessageChild
from rlcore.process.python_command import python_command

_NUM_VALUES = 1024
_END_S = 10.0
_CONTAINERS = "run both processes as one user in one container, or with: docker run --ipc=host --pid=host"


class ImportingProcess:
    """The process that imports the memory."""

    def __init__(self) -> None:
        self._child = MessageChild(python_command("rlcore.doctor.ipc:serve"))

    def ask(self, device: str, handle: bytes) -> dict[str, Any]:
        """Open the handle there, check the values and add 1 to them."""
        self._child.send([device, handle])
        answer: dict[str, Any] | None = self._child.receive()
        if answer is None:
            return {"error": f"the other process ended with exit code {self._child.close(_END_S)}"}
        return answer

    def close(self) -> None:
        self._child.kill()
        self._child.close(_END_S)


def share(name: str, importer: ImportingProcess) -> CheckVerdict:
    """Share device memory with the other process, which reads and writes it."""
    import torch

    from rlcore.registry import get_device

    device = get_device(name)
    support = device.capabilities()["memory.export_ipc"]
    if support.support == "unsupported":
        return ok(f"not supported: {support.reason}")
    values = torch.arange(_NUM_VALUES, dtype=torch.float32, device=device.torch_device)
    device.synchronize()
    try:
        handle = device.memory.export_ipc(values)
    except UnsupportedError as error:
        return warn(str(error), "rlcore moves weights through host memory instead; change what the message names")
    try:
        answer = importer.ask(device.name, handle.to_bytes())
    finally:
        device.memory.revoke(handle, timeout_s=5)
    if "error" in answer:
        return fail(answer["error"], _CONTAINERS)
    if not torch.equal(values.cpu(), torch.arange(1, _NUM_VALUES + 1, dtype=torch.float32)):
        return fail("the other process read it, but what it wrote did not arrive: it was given a copy", _CONTAINERS)
    return ok(f"another process opened it in {answer['seconds'] * 1e3:.1f} ms, read it and wrote to it")


def serve() -> None:
    """Answer each request on standard input; the main function of the other process."""
    answers = take_standard_output()  # plugins may print; only answers go to standard output
    import torch  # noqa: F401  (before the first handle comes)

    while (request := read_message(sys.stdin.buffer, tuple[str, bytes])) is not None:
        try:
            answer = _open(*request)
        except Exception as error:  # the error is the answer
            text = f"{type(error).__name__}: {error}"
            answer = {"error": text.encode(errors="replace").decode()}  # a path in it need not be Unicode
        write_message(answers, answer)


def _open(name: str, data: bytes) -> dict[str, Any]:
    import torch

    from rlcore.registry import get_device
    from rlcore.types import IpcHandle

    device = get_device(name)
    start = time.perf_counter()
    with device.memory.import_ipc(IpcHandle.from_bytes(data)) as mapping:
        seconds = time.perf_counter() - start
        if not torch.equal(mapping.tensor.cpu(), torch.arange(_NUM_VALUES, dtype=torch.float32)):
            return {"error": "the other process read something else than was written"}
        mapping.tensor.add_(1)
        device.synchronize()
    return {"seconds": seconds}
