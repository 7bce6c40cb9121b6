"""Every exception that rlcore raises on purpose.

They are of these classes::

    RlcoreError
    ├── InvalidInputError (ValueError)         a value the caller gave is outside what is accepted
    ├── UnsupportedError (NotImplementedError)  this device, operator or engine cannot do that; says why
    ├── MissingDependencyError (ImportError)    an optional package is absent; says the pip command
    ├── TorchImportError (ImportError)          torch cannot be imported; says why
    ├── PluginError                             a plugin could not be loaded or registered something wrong
    ├── DeviceError                             a device is unknown, absent or failed
    ├── StateError                              calls in a wrong order; says the call to make
    ├── WorkerError                             user code failed inside a worker
    │   ├── WorkerDiedError                     its process ended
    │   └── WorkerTimeoutError                  it did not answer in time
    ├── CollectiveError                         ranks of a group could not do something together; names them
    │   ├── CollectiveTimeoutError (TimeoutError)  some did not take part in time
    │   └── PeerDiedError                       a rank's process has ended
    ├── CheckpointError                         a checkpoint is missing, damaged, foreign or not writable
    ├── SyncError                               a weight sync failed; says what state the engine is in
    ├── RolloutError                            episodes cannot go on, or a reward function failed
    │   └── RolloutTimeoutError (TimeoutError)  they, or it, did not end in time
    └── BenchError                              a benchmark cannot run, or its record is unreadable

A message names the object, the value given, what is accepted and what to do.
"""

from __future__ import annotations

_LONGEST = 300
"""Characters of an error in one line."""
_STACK_FOLLOWS = "; the worker was at:"


def printable(text: str) -> str:
    r"""Return ``text`` with control characters as in a Python string, such as ``\x1b``: no text commands a terminal."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def one_line(error: BaseException) -> str:
    """Return "Type: text" of any exception, in one printable line of at most 300 characters and "..."."""
    text = " ".join(_text(error).split())
    text = printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as failed:  # the user's __str__ failed
        return f"<its text cannot be had: {_representation(failed)}>"


def _representation(error: BaseException) -> str:
    try:
        return repr(error)
    except BaseException:  # the user's, too
        return type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, which says all but stacks and tracebacks; its type if it has none."""
    return str(error).partition("\n")[0].removesuffix(_STACK_FOLLOWS) or type(error).__name__


class RlcoreError(Exception):
    """Base of all errors raised by rlcore."""

    is_out_of_memory = False
    """An allocation of a worker has failed behind it: its text, or a note on it, says what holds the memory."""


class InvalidInputError(RlcoreError, ValueError):
    """A value the caller gave is outside what is accepted."""


class UnsupportedError(RlcoreError, NotImplementedError):
    """A feature that this device, operator or engine does not have."""

    def __init__(self, feature: str, reason: str) -> None:
        super().__init__(f"{feature} is not supported: {reason}")
        self.feature = feature
        self.reason = reason


class MissingDependencyError(RlcoreError, ImportError):
    """An optional package is absent."""

    def __init__(self, package: str, *, needed_for: str, extra: str) -> None:
        super().__init__(f"{needed_for} needs the package {package!r}; run: pip install 'rlcore[{extra}]'")
        self.package = package


class TorchImportError(RlcoreError, ImportError):
    """torch, or a back end that it loads by itself, cannot be imported; the ``__cause__`` is its own error."""

    def __init__(self, cause: Exception) -> None:
        behind = f" ({type(cause.__cause__).__name__}: {cause.__cause__})" if cause.__cause__ else ""
        reason = f"{type(cause).__name__}: {cause}{behind}"
        super().__init__(f"import torch failed: {reason}; `rlcore doctor` says what to do")


class PluginError(RlcoreError):
    """A plugin could not be loaded, or registered something wrong."""


class DeviceError(RlcoreError):
    """A device is unknown, not available here, or failed."""


class StateError(RlcoreError):
    """Calls in a wrong order. The message ends with the call to make."""


class WorkerError(RlcoreError):
    """User code failed inside a worker; the original is the ``__cause__`` where it ran in this process."""

    def __init__(self, *, rank: int, device: str, method: str, error: str, traceback: str) -> None:
        """``error`` is the text of ``one_line``."""
        super().__init__(f"{method}() failed on rank {rank} ({device}): {error}\n\n{traceback.rstrip()}")
        self.rank = rank
        self.device = device
        self.method = method
        self.traceback = traceback


class WorkerDiedError(WorkerError):
    """A worker's process ended while its engine needed it."""

    def __init__(self, *, rank: int, device: str, method: str, how: str, has_begun: bool = True) -> None:
        """``how`` it ended, in words; ``has_begun`` is False if it had ended before it was sent the call."""
        when = "during" if has_begun else "before"
        RlcoreError.__init__(self, f"the worker of rank {rank} ({device}) {how} {when} {method}()")
        self.rank, self.device, self.method, self.traceback = rank, device, method, ""


class WorkerTimeoutError(WorkerError):
    """A worker did not answer in time; the message ends with what it was doing."""

    def __init__(self, *, rank: int, device: str, method: str, timeout_s: float, stack: str, state: str) -> None:
        """``state`` is a verb and more, such as "is stopped (SIGSTOP)"."""
        late = f"{method}() did not end within {timeout_s:g} s on rank {rank} ({device}), which {state}"
        RlcoreError.__init__(self, f"{late}{_STACK_FOLLOWS}\n\n{stack}")
        self.rank, self.device, self.method, self.traceback = rank, device, method, stack


class CollectiveError(RlcoreError):
    """Ranks of a group could not do something together. ``ranks`` are those at fault, where that is known."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Some ranks did not take part in time."""


class PeerDiedError(CollectiveError):
    """The process of a rank has ended."""


class CheckpointError(RlcoreError):
    """A checkpoint or model folder is missing, damaged, foreign, or could not be written."""


class SyncError(RlcoreError):
    """A weight sync failed. The message says what state the receiving engine was left in."""


class RolloutError(RlcoreError):
    """Episodes cannot go on: no sampler is left, or too many failed in a row. Or a reward function failed."""


class RolloutTimeoutError(RolloutError, TimeoutError):
    """Episodes, or a reward function, did not end in time."""


class BenchError(RlcoreError):
    """A benchmark cannot run here, or its record is malformed, foreign or could not be written."""
