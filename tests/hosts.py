"""Two or three "hosts" on this machine, for tests of what runs on several: the fixtures ``two_hosts``, ``three_hosts``.

A host is a set of Linux namespaces (tests/hosts_process.py): it has an address, a name, a boot id, process ids, shared
memory, /run and /tmp of its own. The program, its environment and the test's ``tmp_path`` are seen by all, as over a
shared file system.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.warm import LIMIT_S

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("host-a", "host-b", "host-c")
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc")
ENTER = ["--net", "--mount", "--pid", "--uts", "--ipc"]
StartHosts = Callable[..., contextlib.AbstractContextManager["list[Host]"]]


@functools.cache
def why_no_hosts() -> str:
    """Return why hosts cannot be made here, or ""."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)} (packages iproute2, util-linux)"
    trial = "ip link add br0 type bridge && mount -t tmpfs none /mnt"
    command = ["unshare", *ENTER, "--fork", "--mount-proc", "sh", "-c", trial]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"needs the right to make namespaces (root has it): {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One host.

    Attributes:
        address: its IPv4 address, on the interface eth0.
        pid: of its first process, as this machine counts.
    """

    def __init__(self, name: str, address: str, pid: int) -> None:
        self.name = name
        self.address = address
        self.pid = pid
        self._programs = contextlib.ExitStack()

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, own_pid: int | None = None
    ) -> subprocess.Popen[str]:
        """Start a program there, which ends with the process returned, and with the host.

        Args:
            own_pid: the process id that it gets on its host.
        """
        bound = ["setpriv", "--pdeathsig", "KILL", *command]
        if own_pid is not None:
            text = f'echo {own_pid - 1} > /proc/sys/kernel/ns_last_pid; "$@" & wait $!'
            bound = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", text, "sh", *bound]
        program = subprocess.Popen(
            ["nsenter", "--target", str(self.pid), *ENTER, *bound],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | dict(environment or {}),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._programs.enter_context(program)
        self._programs.callback(program.kill)
        return program

    def python(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        """Start this Python there; see ``start``."""
        return self.start([sys.executable, *arguments], **options)  # type: ignore[arg-type]

    def run(self, command: str) -> str:
        """Run a command of the shell there; returns what it printed, and raises if it fails."""
        inside = ["nsenter", "--target", str(self.pid), *ENTER, "sh", "-c", command]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def cut(self) -> None:
        """Take the link to the other hosts down."""
        self.run("ip link set eth0 down")

    def mend(self) -> None:
        self.run("ip link set eth0 up")

    def limit(self, megabits: int) -> None:
        """Let the host send no more than so many megabits a second."""
        self.run(f"tc qdisc replace dev eth0 root tbf rate {megabits}mbit burst 64kb latency 400ms")

    def end_programs(self) -> None:
        self._programs.close()

    def sent_bytes(self) -> int:
        """Return the bytes that have left the host."""
        return int(self.run("cat /run/sys/class/net/eth0/statistics/tx_bytes"))


@contextlib.contextmanager
def hosts(
    number: int, shared: Path, *, also: Sequence[Path] = (), is_one_machine: bool = False
) -> Iterator[list[Host]]:
    """Make hosts, which go at the end, also if this process is killed.

    Args:
        shared, also: folders that all of them see.
        is_one_machine: they are containers of one machine: they have its boot id.
    """
    kept = {str(Path(path).resolve()) for path in (shared, *also, ROOT, sys.prefix, sys.base_prefix)}
    wanted = {"names": NAMES[:number], "is_one_machine": is_one_machine, "kept": sorted(kept)}
    program = [sys.executable, "-I", str(Path(__file__).with_name("hosts_process.py")), json.dumps(wanted)]
    keeper = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with keeper:
        assert keeper.stdout is not None and keeper.stdin is not None and keeper.stderr is not None
        try:
            line = keeper.stdout.readline()
            assert line, keeper.stderr.read()
            pids = json.loads(line)
            made = [Host(NAMES[at], f"10.77.0.{at + 1}", pid) for at, pid in enumerate(pids)]
            try:
                yield made
            finally:
                for host in made:
                    host.end_programs()
        finally:
            keeper.kill()


@pytest.fixture
def start_hosts(tmp_path: Path) -> StartHosts:
    """``with start_hosts(2) as [here, there]:``; all see ``tmp_path``, and the folders in ``also=``."""
    return lambda number, **options: hosts(number, tmp_path, **options)


@pytest.fixture
def two_hosts(start_hosts: StartHosts) -> Iterator[list[Host]]:
    with start_hosts(2) as found:
        yield found


@pytest.fixture
def three_hosts(start_hosts: StartHosts) -> Iterator[list[Host]]:
    with start_hosts(3) as found:
        yield found
