"""The names of places through which workers find each other: a folder of one host, or a part of the board."""

from __future__ import annotations

BOARD = "board:"
"""Begins the name of a part of the board."""


def is_on_board(place: str) -> bool:
    return place.startswith(BOARD)
