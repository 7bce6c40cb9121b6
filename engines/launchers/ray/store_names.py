"""The names of rendezvous stores: a folder of one host, or a part of the store actor."""

from __future__ import annotations

RAY_STORE = "ray-store:"
"""Begins the name of a part of the store actor."""


def is_ray_store(name: str) -> bool:
    return name.startswith(RAY_STORE)
