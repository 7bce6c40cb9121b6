"""A child process that exchanges messages with its parent over its standard input and output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any, TypeVar

from rlcore.process.framing import read_message, write_message

T = TypeVar("T")


class MessageChild:
    """A child that ends when its input ends.

    It reads with ``read_message`` from its standard input and writes to ``take_standard_output()``.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        errors: IO[bytes] | None = None,
        has_own_session: bool = False,
    ) -> None:
        """Start ``command``.

        Args:
            environment: its variables; None is this process's.
            errors: a file for its standard error; None is this process's.
            has_own_session: Ctrl-C in the terminal does not end it, and what it has started is killed with it.
        """
        self._has_own_session = has_own_session
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=has_own_session,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True while it runs. One that has ended is not waited for here: its process group can still be killed."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process.returncode is None and os.waitid(os.P_PID, self._process.pid, how) is None

    def send(self, message: object) -> None:
        """Raise BrokenPipeError when it has ended."""
        assert self._process.stdin is not None
        write_message(self._process.stdin, message)

    def receive(self, kind: type[T] | Any = Any) -> T | None:
        """Wait for its next message and return it as a ``kind``; None when it has ended."""
        assert self._process.stdout is not None
        return read_message(self._process.stdout, kind)

    def kill(self) -> None:
        """Kill it, and its process group where it has a session of its own, unless its end is known already."""
        if self._has_own_session and self._process.returncode is None:  # no other process has its number yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()

    def close(self, timeout_s: float = 0.0) -> int:
        """End its input, wait so long for its end, else kill it; return its exit code as ``subprocess`` has it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._process.stdout.close()
        return code
