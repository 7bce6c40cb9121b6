"""The network interface on which collective libraries listen, where ranks of other hosts have to reach this one.

Left alone gloo takes the address of the host's name, which is often that of the loopback interface or of none, and
other libraries take the interface that they find first. The interface of the address by which the hosts reach each
other is the one that works.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from rlcore.errors import DeviceError

_EXACT = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "=", "HCCL_SOCKET_IFNAME": "="}
"""The libraries' variables, and what stands before a whole name: NCCL and HCCL take others that begin so otherwise."""
INTERFACE_VARIABLES = tuple(_EXACT)
_SIOCGIFCONF = 0x8912
_ENTRY_BYTES, _NAME_BYTES = 40, 16
_MOST_ENTRIES = 1024

_chosen: dict[str, str] = {}
"""The variables that this process has set for itself, and their values."""


def use_interface_of(address: str) -> None:
    """Have collective libraries of this process use the interface of this host's address, unless the user has said.

    An address of the loopback interface, or "", or one that no interface has, changes nothing.
    """
    name = interface_of(address) if address else ""
    if name and not ipaddress.ip_address(address).is_loopback:
        for variable, exact in _EXACT.items():
            if variable not in os.environ:
                os.environ[variable] = _chosen[variable] = exact + name


def interface_variables(address: str) -> dict[str, str]:
    """Return the variables by which a process uses the interface of this host's address.

    Raises:
        DeviceError: no interface of this host has the address.
    """
    name = interface_of(address)
    if not name:
        raise DeviceError(
            f"no network interface of {socket.gethostname()} has the address {address}, at which other hosts reach it"
        )
    return {variable: exact + name for variable, exact in _EXACT.items()}


def without_chosen(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment as the user has made it, for processes that talk within this host."""
    return {name: value for name, value in environment.items() if _chosen.get(name) != value}


def address_towards(host: str) -> str:
    """Return the address of this host from which packets to another one leave; "" where there is no way to it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def address_in_world() -> str:
    """Return the address of this host by which it reaches the first rank of torchrun's world; "" without a world."""
    first = os.environ.get("MASTER_ADDR", "")
    return address_towards(first) if first else ""


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address of this host; "" if none has."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped is not None:
        wanted = wanted.ipv4_mapped
    found = _ipv6_interfaces() if isinstance(wanted, ipaddress.IPv6Address) else _ipv4_interfaces()
    return found.get(wanted, "")


def _ipv4_interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    """Return the interface of each address, netdevice(7)."""
    buffer = bytearray(_MOST_ENTRIES * _ENTRY_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        at = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("@iP", len(buffer), at))
    num_bytes, _ = struct.unpack("@iP", answer)
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    for start in range(0, num_bytes, _ENTRY_BYTES):
        name = bytes(buffer[start : start + _NAME_BYTES]).split(b"\0")[0].decode()
        first = start + _NAME_BYTES + 4  # of the sockaddr_in, after family and port
        found[ipaddress.IPv4Address(bytes(buffer[first : first + 4]))] = name.partition(":")[0]
    return found


def _ipv6_interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    path = Path("/proc/net/if_inet6")
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {ipaddress.IPv6Address(bytes.fromhex(row[0])): row[5] for row in rows}
