"""The interface on which collective libraries listen: that of the address by which hosts reach each other."""

from __future__ import annotations

import os
import subprocess
import sys
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from rlcore.process import network_interface
from rlcore.process.network_interface import (
    INTERFACE_VARIABLES,
    address_in_world,
    address_towards,
    interface_of,
    use_interface_of,
    without_chosen,
)


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_interface, "_chosen", {})
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_an_address_has_the_interface_that_the_kernel_says() -> None:
    assert interface_of("127.0.0.1") == interface_of("::ffff:127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == interface_of("2001:db8::1") == ""  # of nobody: for documentation
    path = Path("/proc/net/if_inet6")
    has_ipv6 = path.exists() and any(line.split()[-1] == "lo" for line in path.read_text().splitlines())
    assert interface_of("::1") == ("lo" if has_ipv6 else "")


def test_the_way_to_this_host_is_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") == ""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert address_in_world() == ""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert address_in_world() == "127.0.0.1"


def test_variables_are_set_that_the_user_has_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {IPv4Address("10.77.0.1"): "eth5"}
    monkeypatch.setattr(network_interface, "_ipv4_interfaces", lambda: found)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for address in ("", "10.77.0.9"):  # not known, and nobody's
        use_interface_of(address)
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    use_interface_of("10.77.0.1")
    chosen = {name: os.environ.get(name) for name in INTERFACE_VARIABLES}
    assert chosen == {"GLOO_SOCKET_IFNAME": "eth5", "NCCL_SOCKET_IFNAME": "mine", "HCCL_SOCKET_IFNAME": "=eth5"}
    use_interface_of("10.77.0.1")
    left = without_chosen(os.environ)
    assert {name for name in INTERFACE_VARIABLES if name in left} == {"NCCL_SOCKET_IFNAME"}, "the user's own stays"


def test_the_loopback_interface_is_not_chosen() -> None:
    """One host's ranks use it without being told, and others cannot be reached by it."""
    code = (
        "import os; from rlcore.process.network_interface import use_interface_of as use; use('127.0.0.1'); "
        "print([name for name in os.environ if name.endswith('SOCKET_IFNAME')])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in INTERFACE_VARIABLES}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
