"""Planted faults: SIMDEV_FAULT=name makes the device wrong in one way. The C++ half is csrc/faults.h."""

from __future__ import annotations

import os


def has_fault(name: str) -> bool:
    return os.environ.get("SIMDEV_FAULT") == name
