"""Loaded by ``-p`` before all else: the processes that the suite starts are forks of this one, which has torch."""

from __future__ import annotations

from tests.warm import WarmPopen, fork_server, starting

_SERVER = fork_server()

from rlcore.engines.launchers import worker_process  # noqa: E402  # the fork has nothing of rlcore
from rlcore.process import message_child  # noqa: E402


class _Popen(WarmPopen):
    def _folder(self) -> str:
        return _SERVER


message_child.subprocess = worker_process.subprocess = starting(_Popen)  # type: ignore[attr-defined]
