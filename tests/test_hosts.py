"""The hosts that other tests run on are as apart as they say, and nothing of them stays."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import Host, StartHosts

pytestmark = pytest.mark.hosts

SEND = "import socket; s = socket.create_connection(('{}', 5000), timeout=60); s.sendall(bytes({})); s.close()"
TAKE = """
import socket
listener = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
connection, _ = listener.accept()
found = 0
while part := connection.recv(1 << 20):
    found += len(part)
print(found)
"""


def facts(host: Host) -> dict[str, str]:
    return {
        "address": host.run("ip -o -4 addr show eth0 | awk '{print $4}'"),
        "boot id": host.run("cat /proc/sys/kernel/random/boot_id"),
        "name": host.run("hostname"),
        "pids": host.run("readlink /proc/self/ns/pid"),
    }


def test_each_host_is_one_of_its_own(three_hosts: list[Host], tmp_path: Path) -> None:
    found = [facts(host) for host in three_hosts]
    for name in found[0]:
        assert len({one[name] for one in found}) == 3, name
    here, there, _ = three_hosts
    for folder in ("/dev/shm", "/run", "/tmp"):
        here.run(f"touch {folder}/mine")
        assert "mine" in here.run(f"ls {folder}")
        assert "mine" not in there.run(f"ls {folder}")
        assert not Path(folder, "mine").exists()
    here.run(f"touch {tmp_path}/ours")
    assert there.run(f"ls {tmp_path}") == "ours\n"


def test_containers_of_one_machine_have_one_boot_id(start_hosts: StartHosts) -> None:
    with start_hosts(2, is_one_machine=True) as two:
        one, other = map(facts, two)
    assert one["boot id"] == other["boot id"] == Path("/proc/sys/kernel/random/boot_id").read_text()
    assert one["pids"] != other["pids"]


def test_a_link_goes_down_and_up_and_can_be_slow(two_hosts: list[Host]) -> None:
    here, there = two_hosts

    def seconds(num_bytes: int) -> float:
        taking = there.python("-c", TAKE)
        assert taking.stdout is not None and taking.stdout.readline() == "ready\n"
        started = time.monotonic()
        sending = here.python("-c", SEND.format(there.address, num_bytes))
        said, _ = taking.communicate(timeout=100)
        assert (int(said), sending.wait(100)) == (num_bytes, 0)
        return time.monotonic() - started

    before = here.sent_bytes()
    seconds(1 << 20)
    assert here.sent_bytes() - before > 1 << 20
    here.limit(8)
    assert seconds(2 << 20) > 1.5, "at a megabyte a second"
    here.cut()
    refused = here.python("-c", SEND.format(there.address, 1))
    _, error = refused.communicate(timeout=100)
    assert "Network is unreachable" in error
    here.mend()
    seconds(1000)


def test_programs_get_the_process_id_that_is_asked_for(two_hosts: list[Host]) -> None:
    for host in two_hosts:
        program = host.python("-c", "import os; print(os.getpid())", own_pid=4321)
        said, error = program.communicate(timeout=100)
        assert said == "4321\n", error


PROGRAM = """
import sys, time
from pathlib import Path
from tests.hosts import hosts
with hosts(2, Path(sys.argv[1])) as found:
    found[0].start(["sleep", "1000"])
    print(*[host.pid for host in found], flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_all_vanishes_with_the_program(how: signal.Signals, tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    assert program.stdout is not None
    watched = [os.pidfd_open(int(pid)) for pid in program.stdout.readline().split()]
    program.send_signal(how)
    program.wait()
    program.stdout.close()
    for descriptor in watched:  # a namespace's first process ends last, after all others in it
        poll = select.poll()
        poll.register(descriptor)
        assert poll.poll(60_000)
        os.close(descriptor)
