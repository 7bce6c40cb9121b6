"""The options of one round of a weight sync, and the time that is left of it."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Literal

from rlcore.arguments import FLAG
from rlcore.engines.weight_sync.transports.base import ROUTES, Route
from rlcore.engines.weight_sync.transports.staging_buffers import check_slot_bytes
from rlcore.errors import InvalidInputError, SyncError

Checksums = Literal["off", "sample", "always"]
CHECKSUMS = ("off", "sample", "always")
_SAMPLED = 16
"""With "sample" one bucket in so many carries a checksum, always the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """The caller's options, which ``TrainEngine.sync_weights`` describes.

    Raises:
        InvalidInputError: a value outside of what is accepted.
    """

    version: int
    route: Route | None = None
    is_staged: bool = False
    is_verified: bool = False
    is_delta: bool = False
    checksums: Checksums = "sample"
    staging_bytes: int | None = None
    is_same: bool = False
    """As far as the caller knows, neither side's weights have changed since the last round between them."""
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.route is not None and self.route not in ROUTES:
            raise InvalidInputError(f"route must be one of {', '.join(ROUTES)}, or None, got {self.route!r}")
        if self.checksums not in CHECKSUMS:
            raise InvalidInputError(f"checksums must be one of {', '.join(CHECKSUMS)}, got {self.checksums!r}")
        for name, value in {"staged": self.is_staged, "verify": self.is_verified, "delta": self.is_delta}.items():
            if not FLAG.has(value):
                raise InvalidInputError(f"{name} must be {FLAG.words}, got {value!r}")
        if self.is_staged and self.is_verified:
            raise InvalidInputError(
                "staged=True and verify=True cannot be had in one round: verification has the engine's own loader "
                "write into the weights that are served; verify a round without staged"
            )
        if self.staging_bytes is not None:
            check_slot_bytes(self.staging_bytes)
        if type(self.version) is not int or self.version < 0:
            raise InvalidInputError(f"version must be a whole number of at least 0, or None, got {self.version!r}")
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < float("inf"):
            raise InvalidInputError(f"timeout_s must be a positive number of seconds, got {self.timeout_s!r}")

    def is_checked(self, step: int) -> bool:
        """Return True if the buckets of a step carry checksums."""
        return self.checksums == "always" or (self.checksums == "sample" and step % _SAMPLED == 0)


def staging_bytes_of(staging_bytes: int | None, slab_bytes: int | None) -> int | None:
    """Return the value of ``staging_bytes``, which callers may still give by its former name.

    Raises:
        InvalidInputError: both are given.
    """
    if slab_bytes is None:
        return staging_bytes
    if staging_bytes is not None:
        raise InvalidInputError("staging_bytes and slab_bytes, its former name, were both given; give staging_bytes")
    warnings.warn(  # at the line that calls the public method
        "slab_bytes is called staging_bytes now, and the next version no longer takes it",
        DeprecationWarning,
        stacklevel=3,
    )
    return slab_bytes


class Clock:
    """The time of one round."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._started = time.perf_counter()

    def left(self) -> float:
        """Return the seconds until the deadline; raises SyncError when there are none."""
        left_s = self._timeout_s - self.seconds
        if left_s <= 0:
            raise SyncError(f"the weight sync did not end within {self._timeout_s:g} s")
        return left_s

    @property
    def seconds(self) -> float:
        """Seconds since the round began."""
        return time.perf_counter() - self._started
