"""Exporting, importing and revoking hundreds of times leaves everything where it was, in both processes."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from .conftest import MakePeer, Peer

NUM_CYCLES = 300
CYCLES_A_REQUEST = 100
SPANS = 3
"""What is leaked grows in each of them; once may grow what something else needed, or what was just ending."""
MB = 2**20
NUM_BYTES = MB // 4
SLACK = 16 * MB  # a fifth of what is leaked if each cycle leaks its tensor

EXPORT = """
for _ in range(count):
    tensor = torch.ones({size}, device=device.torch_device)
    device.synchronize()
    handle = device.memory.export_ipc(tensor)
    handles.write(handle.to_bytes().hex() + "\\n")
    assert answers.readline() == "{size}.0\\n"
    device.memory.revoke(handle)
    {{forget}}
    device.memory.empty_cache()  # so that on a GPU each cycle has a block of its own
""".replace("{size}", str(NUM_BYTES // 4))
IMPORT = """
for _ in range(count):
    with device.memory.import_ipc(handle_of(handles.readline())) as mapping:
        answers.write(f"{mapping.tensor.sum().item()}\\n")
"""
STATE = """
import gc; gc.collect(); device.synchronize(); device.memory.empty_cache()
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
result = {
    "descriptors": len(os.listdir("/proc/self/fd")),
    "threads": int(fields["Threads"]),
    "exports": len(device.memory.ledger()),
    "sockets": len([name for name in os.listdir(os.environ["RLCORE_RUNTIME"]) if str(os.getpid()) in name]),
    "shared memory": len([name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name]),
    "allocated bytes": device.memory.stats().allocated_bytes,
    "host bytes": sum(int(fields[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssShmem")),
    "mappings": sum(1 for _ in open("/proc/self/maps")),
}
"""
MAY_GROW = {"allocated bytes": SLACK, "host bytes": SLACK, "mappings": NUM_CYCLES // 4, "bytes of the device": SLACK}
"""What allocators and the kernel round, and by how much; of the rest there is no more than there was."""

State = dict[str, dict[str, int]]


class Cycles:
    """An exporter and an importer, joined by two pipes."""

    def __init__(self, exporter: Peer, importer: Peer, folder: Path) -> None:
        self.peers = {"exporter": exporter, "importer": importer}
        there, back = str(folder / "there"), str(folder / "back")
        os.mkfifo(there)
        os.mkfifo(back)
        self._both("{name} = open(there, {mode!r}, buffering=1)", "handles", "w", "r", there=there)
        self._both("{name} = open(back, {mode!r}, buffering=1)", "answers", "r", "w", back=back)

    def run(self, count: int, forget: str = "del tensor") -> None:
        for done in range(0, count, CYCLES_A_REQUEST):
            now = min(CYCLES_A_REQUEST, count - done)
            self._together(EXPORT.replace("{{forget}}", forget), IMPORT, count=now)

    def state(self) -> State:
        return {name: peer.run(STATE) for name, peer in self.peers.items()}

    def _both(self, code: str, name: str, exporter_mode: str, importer_mode: str, **values: Any) -> None:
        self._together(*(code.format(name=name, mode=mode) for mode in (exporter_mode, importer_mode)), **values)

    def _together(self, of_exporter: str, of_importer: str, **values: Any) -> None:
        importing = threading.Thread(target=self.peers["importer"].run, args=(of_importer,), kwargs=values)
        importing.start()
        self.peers["exporter"].run(of_exporter, **values)
        importing.join()


@pytest.fixture
def cycles(make_peer: MakePeer, tmp_path: Path) -> Cycles:
    return Cycles(make_peer(), make_peer(), tmp_path)


def grown(before: State, after: State) -> set[str]:
    """What there is more of than may be."""
    return {
        f"{what} of the {owner}"
        for owner, state in before.items()
        for what, then in state.items()
        if after[owner][what] - then > MAY_GROW.get(what, 0)
    }


@pytest.mark.slow
def test_hundreds_of_cycles_leave_everything_as_it_was_and_a_leak_would_be_seen(device: Any, cycles: Cycles) -> None:
    def state() -> State:
        info = device.memory.info()  # of a host everybody takes and gives
        taken = 0 if device.spec.is_host else info.total_bytes - info.free_bytes
        return cycles.state() | {"machine": {"bytes of the device": taken}}

    cycles.run(100)  # torch, glibc and the driver take what they keep
    states, leaked = [state()], {"?"}
    while leaked and len(states) <= SPANS:
        cycles.run(NUM_CYCLES)
        states.append(state())
        leaked = set.intersection(*(grown(*span) for span in itertools.pairwise(states)))
    assert not leaked, states
    cycles.run(NUM_CYCLES // 3, forget="kept = [*globals().get('kept', []), tensor]")
    assert "allocated bytes of the exporter" in grown(states[-1], state())
