"""The options of a quickstart run, checked when they are made, and kept as JSON in the folder of the run."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec

from rlcore.errors import CheckpointError, InvalidInputError

_MAX_SEED = 2**63 - 1  # what the sampler takes
RECORD = "run.json"
_OUTPUT = "outputs/quickstart"
MAX_THREADS = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartConfig:
    """The options of ``rlcore quickstart``."""

    model: Path | None = None
    """Folder of a Hugging Face causal language model; None is the quickstart's own small one."""
    device: str | None = None
    """A name such as "cuda:1"; None is the choice of ``rlcore.get_device()``."""
    executor: str = "hf"
    """The inference executor that samples: "hf", "vllm" or "sglang"."""
    launcher: str | None = None
    """How the engines' workers run, such as "process" or "ray", which does not change the curve; None runs them in the
    program's own process."""
    seed: int = 0
    """Seed of the splits, the initial weights and all sampling; in [0, 2**63)."""
    threads: int | None = None
    """Threads that torch computes with on the host; None is one for the quickstart's own model, which is so small that
    more wait for each other most of the time, and torch's choice for another."""
    steps: int = 100
    """Total number of GRPO steps, with those before a resume; at least 1."""
    output: Path = Path(_OUTPUT)
    """Folder of the run: metrics, picture and checkpoint."""
    resume: bool = False
    """Continue the run that ``output`` holds."""
    shuffle_rewards: bool = False
    """The control experiment: rewards are shuffled within each group, so that nothing can be learned."""
    simulation: str = ""
    """The simulation on which the run, or a part of it, took place, in words; no option, but found when it runs."""

    def __post_init__(self) -> None:
        self._require("model", self.model is None or isinstance(self.model, Path), "a pathlib.Path or None")
        self._require(
            "device",
            self.device is None or _is_word(self.device),
            'a name such as "cpu" or "cuda:1", or None',
        )
        self._require("executor", _is_word(self.executor), 'the name of an inference executor, such as "hf" or "vllm"')
        self._require("launcher", self.launcher is None or _is_word(self.launcher), "the name of a launcher, or None")
        self._require("seed", type(self.seed) is int and 0 <= self.seed <= _MAX_SEED, "a whole number in [0, 2**63)")
        self._require(
            "threads",
            self.threads is None or (type(self.threads) is int and 1 <= self.threads <= MAX_THREADS),
            f"a whole number from 1 to {MAX_THREADS}, or None",
        )
        self._require("steps", type(self.steps) is int and self.steps >= 1, "a whole number of at least 1")
        self._require("output", isinstance(self.output, Path), "a pathlib.Path")
        self._require("resume", isinstance(self.resume, bool), "True or False")
        self._require("shuffle_rewards", isinstance(self.shuffle_rewards, bool), "True or False")
        self._require("simulation", isinstance(self.simulation, str), "a str")

    def _require(self, name: str, is_good: bool, accepted: str) -> None:
        if not is_good:
            raise InvalidInputError(f"QuickstartConfig.{name} must be {accepted}, got {getattr(self, name)!r}")

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self, enc_hook=str))

    @classmethod
    def from_json(cls, data: bytes) -> QuickstartConfig:
        """Read the JSON of ``to_json``. Raises CheckpointError for anything else."""
        try:
            found = {"simulation": "", "launcher": None} | msgspec.json.decode(
                data, type=dict[str, Any]
            )  # which older runs do not have
            names = {field.name for field in dataclasses.fields(cls)}
            if found.keys() != names:
                raise CheckpointError(f"it must have the fields {sorted(names)}, and has {sorted(found)}")
            return msgspec.convert(found, cls, dec_hook=_decode_path)
        except (msgspec.DecodeError, InvalidInputError, RecursionError) as error:
            raise CheckpointError(str(error)) from error

    @classmethod
    def resuming(cls, output: Path, **given: Any) -> QuickstartConfig:
        """Return the options of the run in ``output``, if there is one, replaced by those that are given now.

        Raises:
            CheckpointError: run.json is damaged.
        """
        record = output / RECORD
        if not record.exists():
            return cls(output=output, resume=True, **given)
        return dataclasses.replace(cls.read(record), output=output, resume=True, **given)

    @classmethod
    def read(cls, record: Path) -> QuickstartConfig:
        """Read a file. Raises CheckpointError that names it."""
        try:
            return cls.from_json(record.read_bytes())
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"{record} cannot be read: {error}; use another --output") from error

    def resume_command(self) -> str:
        """Return the shell command that continues this run in the same directory."""
        command = [*_program(), "quickstart", "--resume"]
        if self.output != Path(_OUTPUT):
            command += ["--output", str(self.output)]
        return shlex.join(command)

    def differences(self, other: QuickstartConfig) -> list[str]:
        """Return the differences that make ``other`` another run with another curve, such as ``["seed 0, not 1"]``.

        The device, the launcher, the threads, the folder and a larger number of steps do not matter.
        """
        return [
            f"{name} {_shown(ours)}, not {_shown(theirs)}"
            for name in ("model", "executor", "seed", "shuffle_rewards")
            if (ours := getattr(self, name)) != (theirs := getattr(other, name))
        ]


def _program() -> list[str]:
    """Return the command: ``rlcore`` if the shell finds that of this interpreter, as in an activated environment."""
    found = shutil.which("rlcore")
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    return ["rlcore"] if is_ours else [sys.executable, "-m", "rlcore"]


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value != "" and not any(map(str.isspace, value))


def _decode_path(wanted: type[Path], value: object) -> Path:
    if not isinstance(value, str):
        raise TypeError(f"a {wanted.__name__} must be a string, got {value!r}")
    return wanted(value)


def _shown(value: object) -> str:
    return str(value) if isinstance(value, Path) else repr(value)
