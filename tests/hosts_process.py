"""Makes "hosts" out of Linux namespaces, and keeps them until its standard input ends. Run inside ``unshare --net``.

Each host has interfaces, mounts, process ids, a name and System V IPC of its own; its mounts are /dev/shm, /run and
/tmp. A bridge of this process's network namespace joins them. The machine's own network is not touched, and all of it
goes with this process, however that ends.

    python hosts_process.py '{"names": ["host-a", "host-b"], "is_one_machine": false, "kept": ["/tmp/shared"]}'

It prints the process ids of the hosts' first processes, as JSON.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import uuid
from pathlib import Path

OWN_FOLDERS = {"/dev/shm": "1777", "/run": "755", "/tmp": "1777"}
"""Folders that every host has for itself, and their modes."""


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def script(name: str, boot_id: str, kept: list[str]) -> str:
    """What the first process of a host does; ``kept`` are folders that stay as they are."""
    lines = ["set -e", f"hostname {name}", "mkdir -p /run"]
    hidden = [path for path in kept if any(path.startswith(f"{own}/") for own in OWN_FOLDERS)]
    lines += ["mount -t tmpfs -o mode=755 none /mnt"]
    for number, path in enumerate(hidden):
        lines += [f"mkdir /mnt/{number}", f"mount --bind {shlex.quote(path)} /mnt/{number}"]
    lines += [f"mount -t tmpfs -o mode={mode} none {path}" for path, mode in OWN_FOLDERS.items()]
    for number, path in enumerate(hidden):
        lines += [f"mkdir -p {shlex.quote(path)}", f"mount --move /mnt/{number} {shlex.quote(path)}"]
    lines += ["umount /mnt", "mkdir /run/sys", "mount -t sysfs none /run/sys"]  # of this host's network
    if boot_id:
        lines += [f"echo {boot_id} > /run/boot_id", "mount --bind /run/boot_id /proc/sys/kernel/random/boot_id"]
    lines += ["echo ready", "while :; do sleep 86400 & wait $!; done"]  # and is the parent of orphans
    return "\n".join(lines)


def start(name: str, boot_id: str, kept: list[str]) -> subprocess.Popen[str]:
    own = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--mount-proc"]
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *own, "sh", "-c", script(name, boot_id, kept)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def join(number: int, pid: int) -> None:
    """Give the host of process ``pid`` the interface eth0 with the address 10.77.0.<number>."""
    inside = ["nsenter", "-t", str(pid), "-n", "ip"]
    run(*f"ip link add port{number} type veth peer name eth0 netns {pid}".split())
    run(*f"ip link set port{number} master br0 up".split())
    run(*inside, *f"addr add 10.77.0.{number}/24 dev eth0".split())
    for name in ("lo", "eth0"):
        run(*inside, *f"link set {name} up".split())


def main() -> None:
    wanted = json.loads(sys.argv[1])
    run(*["ip", "link", "add", "br0", "type", "bridge"])
    run(*["ip", "link", "set", "br0", "up"])
    hosts = []
    for name in wanted["names"]:
        boot_id = "" if wanted["is_one_machine"] else str(uuid.uuid4())
        hosts.append(start(name, boot_id, wanted["kept"]))
    pids = []
    for number, host in enumerate(hosts, 1):
        assert host.stdout is not None
        if host.stdout.readline() != "ready\n":
            sys.exit(f"host {number} could not be made")
        children = Path(f"/proc/{host.pid}/task/{host.pid}/children")
        pids.append(int(children.read_text()))
        join(number, pids[-1])
    print(json.dumps(pids), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
