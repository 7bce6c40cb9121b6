"""That a wrong argument is refused in words of rlcore, with the value and what is accepted: every error of one tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlcore.device import Device
from rlcore.errors import InvalidInputError

WRONG: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "a seed that is no number": (
        "identity.seed",
        lambda device: device.seed("x"),
        r"^seed takes a whole number of at most 64 bits as value, got 'x'$",
    ),
    "a seed of more than 64 bits": (
        "identity.seed",
        lambda device: device.seed(2**64),
        r"^seed takes a whole number of at most 64 bits as value, got 18446744073709551616$",
    ),
    "no random state": (
        "identity.set_rng_state",
        lambda device: device.set_rng_state(None),
        r"^set_rng_state takes what rng_state\(\) gave, a uint8 tensor in host memory as state, got None$",
    ),
    "another device's random state": (
        "identity.set_rng_state",
        lambda device: device.set_rng_state(torch.zeros(3, dtype=torch.uint8)),
        r"^set_rng_state of .* takes what rng_state\(\) of a .* device gave: ",
    ),
    "a priority that is no number": (
        "streams.new",
        lambda device: device.streams.new(priority="high"),
        r"^new takes a whole number as priority, got 'high'$",
    ),
    "no stream": (
        "streams.use",
        lambda device: device.streams.use(None),
        r"^use takes a stream of this device as stream, got None$",
    ),
    "an event that is timed by a word": (
        "streams.event",
        lambda device: device.streams.event(timing="yes"),
        r"^event takes True or False as timing, got 'yes'$",
    ),
    "an event for other processes that tells the time": (
        "streams.event",
        lambda device: device.streams.event(timing=True, interprocess=True),
        r"^an interprocess event measures no time; ask for timing=True or interprocess=True$",
    ),
    "a phase without a name": (
        "profiler.range",
        lambda device: device.profiler.range(None),
        r"^range takes a str as name, got None$",
    ),
    "a trace without a path": (
        "profiler.start",
        lambda device: device.profiler.start(None),
        r"^start takes a non-empty str or Path as path, got None$",
    ),
    "copies on no stream": (
        "memory.copy_batch",
        lambda device: device.memory.copy_batch([], [], stream=5),
        r"^copy_batch takes a stream of this device, or None as stream, got 5$",
    ),
    "an export of no list": (
        "memory.export_ipc",
        lambda device: device.memory.export_ipc_together(None),
        r"^export_ipc_together takes a list or tuple as tensors, got None$",
    ),
    "a deadline that has passed": (
        "memory.revoke",
        lambda device: device.memory.revoke(_exported(device), timeout_s=-1),
        r"^timeout_s must be seconds, 0 to 604800 \(a week\), got -1$",
    ),
    "one index for many": (
        "launch.worker_environment",
        lambda device: device.launch.worker_environment(5),
        r"^worker_environment takes a list or tuple as indices, got 5$",
    ),
    "a list in a list": (
        "launch.worker_environment",
        lambda device: device.launch.worker_environment([[0]]),
        r"^the index of a device is a whole number of at least 0, got \[0\]$",
    ),
    "an environment that is none": (
        "launch.visible_devices",
        lambda device: device.launch.visible_devices(5),
        r"^visible_devices takes a mapping such as os.environ as environ, got 5$",
    ),
    "seconds that are none": (
        "collectives.init_kwargs",
        lambda device: device.collectives.init_kwargs(timeout_s="60"),
        r"^timeout_s must be more than 0 seconds, got '60'",
    ),
}
"""Name -> member, use of it, and what the error says."""


def _exported(device: Device) -> Any:
    return device.memory.export_ipc(torch.ones(1, device=device.torch_device))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        pytest.param(use, message, marks=pytest.mark.covers(member), id=name)
        for name, (member, use, message) in WRONG.items()
    ],
)
def test_a_wrong_argument_is_named_with_what_is_accepted(
    device: Device, use: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        use(device)


@pytest.mark.covers("identity.seed")
@pytest.mark.parametrize("value", [0, -1, 2**64 - 1])
def test_any_64_bits_are_a_seed(device: Device, value: int) -> None:
    device.seed(value)
