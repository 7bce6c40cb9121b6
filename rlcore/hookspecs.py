"""The five hooks through which everything enters rlcore, built-ins included.

A hook carries registrations only (data and import paths, nothing is imported); behaviour lives in the classes
and functions that the paths name. Decorate an implementation with ``rlcore.hookimpl`` and expose its module as an
entry point::

    [project.entry-points.rlcore]
    acme = "rlcore_acme.plugin"
"""

from __future__ import annotations

from typing import Protocol

import pluggy

from rlcore.types import DeviceSpec

PROJECT = "rlcore"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RegisterDevice(Protocol):
    def __call__(self, spec: DeviceSpec) -> None: ...


class RegisterOp(Protocol):
    def __call__(
        self, op: str, device_type: str, path: str, *, name: str, priority: int = 0, when: str | None = None
    ) -> None:
        """Offer ``path`` ("pkg.mod:function") as implementation ``name`` of ``op``.

        ``device_type`` is a torch device type, or "*" for any. The highest ``priority`` that does not refuse
        runs. ``when`` names a predicate ("pkg.mod:function") that takes a ``kernels.dispatch.Query`` and
        returns the reason why this implementation cannot serve it, or None.
        """


class RegisterExecutor(Protocol):
    def __call__(self, kind: str, name: str, path: str) -> None:
        """Offer the worker class at ``path`` as executor ``name``; ``kind`` is "train" or "inference"."""


class RegisterLauncher(Protocol):
    def __call__(self, name: str, path: str) -> None:
        """Offer the ``engines.launchers.base.Launcher`` at ``path`` ("pkg.mod:Class") as launcher ``name``."""


class RegisterBenchmark(Protocol):
    def __call__(self, path: str) -> None:
        """Offer the ``bench.case.Case`` at ``path`` ("pkg.mod:case")."""


class Hooks:
    """Hook specifications; a plugin implements any subset as module-level functions."""

    @hookspec
    def rlcore_register_devices(self, register: RegisterDevice) -> None:
        """Register devices with ``register(DeviceSpec(...))``."""

    @hookspec
    def rlcore_register_ops(self, register: RegisterOp) -> None:
        """Register operator implementations."""

    @hookspec
    def rlcore_register_executors(self, register: RegisterExecutor) -> None:
        """Register engine back ends."""

    @hookspec
    def rlcore_register_launchers(self, register: RegisterLauncher) -> None:
        """Register ways to start workers."""

    @hookspec
    def rlcore_register_benchmarks(self, register: RegisterBenchmark) -> None:
        """Register benchmark cases."""
