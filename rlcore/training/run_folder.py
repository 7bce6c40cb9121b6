"""The folder of a run, and the other places that its metrics go to.

    config.json      the configuration of the run
    metrics.jsonl    one object for each step
    episodes.jsonl   one object for each episode that was trained on: step, number, item, rewards, staleness
    checkpoint/      the newest checkpoint of the train engine, with the state of the rollout
    model/           the trained model, as a Hugging Face folder, after the last step
    timeline.json    when each engine did what; timeline-STEP.json of the part of a run that was resumed after STEP

A run that begins again because it left no checkpoint gives the logs other names, such as metrics-1.jsonl.

A step's lines are written before its checkpoint. A resume drops the lines of later steps, which are done again, and is
refused where lines of earlier ones are missing. A run that fails before its samplers have the first weights changes
nothing in the folder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from rlcore.atomic import write_file
from rlcore.engines.checkpoints.export_record import check_free
from rlcore.errors import CheckpointError, InvalidInputError, MissingDependencyError
from rlcore.file_lock import take_folder
from rlcore.step_log import StepLog
from rlcore.training.config import COMPARED, CheckpointSection, MetricsSection, TrainConfig

Metrics = Mapping[str, float]


class TrainFolder:
    """A run's folder, which one process at a time uses; ``begin`` or ``go_on`` is the first that writes to it.

    Raises:
        InvalidInputError: it holds another run, or something else.
        CheckpointError: it is in use, or cannot be written.
    """

    def __init__(self, config: TrainConfig, *, resume: bool) -> None:
        self.path = Path(config.output)
        self.checkpoint, self.model = self.path / "checkpoint", self.path / "model"
        self._record = self.path / "config.json"
        self._logs = {
            name: StepLog(self.path / f"{name}.jsonl", otherwise="give another output=")
            for name in ("metrics", "episodes")
        }
        self._config = config
        if self.path.exists() and not self.path.is_dir():
            raise InvalidInputError(f"{self.path} exists and holds no run of rlcore train; give another output=")
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with self._named_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_folder(self.path)
            with contextlib.ExitStack() as undone:
                undone.callback(self.__exit__)
                self._check(config, resume)
                undone.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the folder, and remove it if it was made here and is empty."""
        with contextlib.suppress(OSError):  # it is not empty
            for folder in self._made:
                folder.rmdir()
        os.close(self._lock)

    @property
    def has_checkpoint(self) -> bool:
        return (self.checkpoint / "manifest.json").exists()

    def append(self, log: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add lines to "metrics" or "episodes", all or none; they are on disk when this returns."""
        try:
            self._logs[log].append(lines)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self._logs[log].path}: {error.strerror}; mend that, and continue with --resume"
            ) from error

    def timeline(self, first: int) -> Path:
        """Return the file for the timeline of a process that went on after a step; 0 is the beginning."""
        return self.path / (f"timeline-{first}.json" if first else "timeline.json")

    def begin(self) -> None:
        """Put the logs of a run that left no checkpoint aside, and write the configuration."""
        with self._named_errors():
            self._put_aside()
        self.go_on(-1)

    def _put_aside(self) -> None:
        """Give the logs other names, with one number, if steps were done."""
        logs = self._logs.values()
        if any(log.num_of_steps() for log in logs):
            number = next(one for one in itertools.count(1) if not any(log.aside(one).exists() for log in logs))
            for log in logs:
                with contextlib.suppress(FileNotFoundError):
                    log.path.rename(log.aside(number))

    def go_on(self, step: int) -> None:
        """Drop the lines of steps after ``step``, and one that a kill cut short, and write the configuration.

        Raises:
            CheckpointError: a log lacks lines of earlier steps, or is damaged: nothing has changed. Or the folder
                cannot be written.
        """
        with self._named_errors():
            metrics, episodes = self._logs.values()
            kept = {
                metrics: metrics.until(step),
                episodes: episodes.until(step, first=1, each=self._config.rollout.batch_size),
            }
            for log, data in kept.items():
                log.replace(data)
            write_file(self._record, msgspec.json.format(msgspec.json.encode(self._config)))

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            raise CheckpointError(f"{self.path} is in use by another process; give another output=") from error
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.path}: {error.strerror}; give another output=") from error

    def _check(self, config: TrainConfig, resume: bool) -> None:
        if not self._record.exists():
            if any(self.path.iterdir()):
                raise InvalidInputError(f"{self.path} exists and holds no run of rlcore train; give another output=")
            return
        check_free(self.model)
        earlier = self._earlier()
        if not self.has_checkpoint:
            self._check_can_begin_again(earlier["checkpoint"].every, resume)
            return
        if not resume:
            raise InvalidInputError(f"{self.path} holds a run; add --resume to continue it, or give another output=")
        if changed := config.differences(earlier):
            raise InvalidInputError(
                f"cannot resume {self.path}: it holds a run with another {', '.join(changed)}; "
                "give the same configuration, or another output="
            )

    def _check_can_begin_again(self, every: int, resume: bool) -> None:
        """Refuse to begin anew over what is there, but for a run that was killed before its first checkpoint was due.

        Args:
            every: the steps after which that run saved.
            resume: a scheduler that gives it always may begin such a run again; without it, that is not meant.
        """
        done = self._logs["metrics"].num_of_steps()
        has_model = self.model.exists()
        if has_model or done > every:
            what = "a trained model" if has_model else f"the metrics of {done} steps"
            raise CheckpointError(
                f"{self.path} has {what} and no checkpoint, and one was due after {every} steps; put {self.checkpoint} "
                "back, or give another output="
            )
        if done and not resume:
            raise InvalidInputError(
                f"{self.path} holds a run of {done} steps without a checkpoint; add --resume to begin it again, or "
                "give another output="
            )

    def _earlier(self) -> dict[str, Any]:
        """Return the configuration of the run that is there. A model's folder has a config.json, too."""
        try:
            found = msgspec.json.decode(self._record.read_bytes())
            if isinstance(found, dict) and found.keys() >= {*COMPARED, "checkpoint"}:
                return found | {"checkpoint": msgspec.convert(found["checkpoint"], CheckpointSection)}
        except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self._record} cannot be read: {error}; give another output=") from error
        raise InvalidInputError(
            f"{self._record} is not the configuration of a run of rlcore train; give another output="
        )


class Trackers:
    """TensorBoard and Weights & Biases, as far as they are asked for. Nothing is written before ``begin``.

    Raises:
        MissingDependencyError: one is asked for, and is absent.
    """

    def __init__(self, config: MetricsSection) -> None:
        self._config = config
        self._make_writer: Any = None
        self._init_run: Any = None
        self._writer: Any = None
        self._run: Any = None
        if config.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise _missing("tensorboard") from error
            self._make_writer = SummaryWriter
        if config.wandb:
            try:
                import wandb
            except ImportError as error:
                raise _missing("wandb") from error
            self._init_run = wandb.init

    def begin(self, folder: Path, plain: dict[str, Any]) -> None:
        """Open them for the run in this folder, whose configuration is ``plain``."""
        if self._make_writer:
            self._writer = self._make_writer(str(folder / "tensorboard"))
        if self._init_run:
            self._run = self._init_run(project=self._config.wandb, dir=str(folder), config=plain)

    def add(self, metrics: Metrics) -> None:
        for name, value in metrics.items() if self._writer else ():
            self._writer.add_scalar(name, value, int(metrics["step"]))
        if self._run:
            self._run.log(dict(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        if self._writer:
            self._writer.close()
        if self._run:
            self._run.finish()


def _missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(package, needed_for=f"metrics.{package}", extra=package)
