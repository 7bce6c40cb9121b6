"""A log of the steps of a run: a file with one JSON object a line, each with its "step", in order.

A kill, or a full disk, leaves the lines before whole, and at most an incomplete one at the end, which does not count.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rlcore.atomic import append_to_file, write_file
from rlcore.errors import CheckpointError


class StepLog:
    """The file of a log.

    Args:
        values: the type of what the objects hold.
        otherwise: what to do where a damaged file cannot be put back, such as "use another --output".
    """

    def __init__(self, path: Path, *, otherwise: str, values: Any = Any) -> None:
        self.path = path
        self._advice = f"put the file back as it was, or {otherwise}"
        self._decode = msgspec.json.Decoder(dict[str, values]).decode

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines, all or none; they are on disk when this returns. Raises OSError."""
        append_to_file(self.path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def replace(self, data: bytes) -> None:
        """Let this be the whole file; one that is so already stays, and so does none for no lines. Raises OSError."""
        if data != self._bytes():
            write_file(self.path, data)

    def aside(self, number: int) -> Path:
        """Return the file for a part of the log that is lost, such as "metrics-1.jsonl"."""
        return self.path.with_stem(f"{self.path.stem}-{number}")

    def read(self) -> list[dict[str, Any]]:
        """Return what each line holds; nothing if there is no file.

        Raises:
            OSError: it cannot be read.
            CheckpointError: a line is damaged.
        """
        return [self._decoded(number, line) for number, line in enumerate(self._lines(), start=1)]

    def num_of_steps(self) -> int:
        """Return the number of lines of steps after 0, which is before the first; raises as ``read`` does."""
        return sum(line["step"] > 0 for line in self.read())

    def until(self, step: int, *, first: int = 0, each: int = 1) -> bytes:
        """Return the part of the file up to the step of a checkpoint, which must be whole.

        Args:
            first: the step of the first line.
            each: the number of lines of a step.

        Raises:
            OSError: the file cannot be read.
            CheckpointError: a line is damaged, or lines of a step are missing, too many, or not in order.
        """
        steps = [line["step"] for line in self.read()]
        for before, after in itertools.pairwise(steps):
            if after < before:
                raise CheckpointError(
                    f"{self.path} has a line of step {before:g} before one of step {after:g}; {self._advice}"
                )
        found = Counter(one for one in steps if one <= step)
        for one in [*range(first, step + 1), *found]:
            if found[one] != each or one < first:
                raise CheckpointError(
                    f"{self.path} must have {each} line{'s' * (each > 1)} for each step from {first} to {step}, after "
                    f"which the checkpoint is, and has {found[one]} for step {one:g}; {self._advice}"
                )
        return b"".join(self._lines()[: found.total()])

    def _lines(self) -> list[bytes]:
        lines = self._bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # being written by the process that has the folder, or cut short by a kill
        return lines

    def _bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""

    def _decoded(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise self._damaged(number, str(error)) from error
        if type(found.get("step")) not in (int, float):
            raise self._damaged(number, f"its step must be a number, got {found.get('step')!r:.100}")
        return found

    def _damaged(self, number: int, why: str) -> CheckpointError:
        return CheckpointError(f"line {number} of {self.path} is damaged: {why}; {self._advice}")
