"""The folder of one quickstart run.

    run.json         the options of the run
    metrics.jsonl    one object a step, as the steps were done
    checkpoint/      the newest checkpoint of the train engine
    model/           the trained model, as a Hugging Face folder
    reward.png       the curve of metrics.jsonl

After a kill at any moment ``--resume`` can continue the folder: it ignores an incomplete line of metrics.jsonl, and
drops the steps after the checkpoint, which are done again. A resume that fails changes nothing.

A step's metrics are numbers by name. The picture shows "reward" (mean of the step's samples), "accuracy" (greedy,
on held-out problems, at the steps where it was measured) and the seconds of each of ``PHASES``.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, final

from rlcore.atomic import write_file
from rlcore.errors import CheckpointError, InvalidInputError, MissingDependencyError
from rlcore.file_lock import take_folder
from rlcore.quickstart.config import RECORD, QuickstartConfig
from rlcore.step_log import StepLog

PHASES = ("generate", "train", "sync", "offload")
"""The phases of a step; "<phase>_s" is the metric, in seconds."""

Metrics = dict[str, float]

_INCHES, _DOTS_PER_INCH = (8.0, 6.0), 150


class Phases:
    """``with phases("train"): ...`` adds to ``phases.seconds["train_s"]``."""

    def __init__(self) -> None:
        self.seconds = {f"{name}_s": 0.0 for name in PHASES}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[f"{name}_s"] += time.perf_counter() - started


@final
class RunFolder:
    """A run's folder, locked in a ``with`` statement: one process at a time uses it."""

    def __init__(self, config: QuickstartConfig) -> None:
        """Make the folder, or open the existing one on ``config.resume``; ``begin`` or ``go_on`` writes to it.

        A run that ended before its first checkpoint left nothing, so another one may start in its folder.

        Raises:
            InvalidInputError: the folder holds another run, or something else.
            CheckpointError: there is nothing to resume, it is damaged, in use, or cannot be written.
            MissingDependencyError: matplotlib is absent; checked at the start and not at the end of the run.
        """
        self.path = config.output
        self.checkpoint = config.output / "checkpoint"
        self.model = config.output / "model"
        self.picture = config.output / "reward.png"
        self.metrics = config.output / "metrics.jsonl"
        self._log = StepLog(self.metrics, otherwise="start again with another --output", values=float | None)
        self._record = config.output / RECORD
        self._config = config
        _figure()
        if config.resume:
            self._check_same_run(config)
        else:
            self._check_unused()
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with self._named_errors("make"):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._taken()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the folder, and remove it if it was made here and is empty."""
        with contextlib.suppress(OSError):  # it is not empty
            for folder in self._made:
                folder.rmdir()
        os.close(self._lock)

    def begin(self) -> None:
        """Write the options of a new run, and remove the metrics of a run that left no checkpoint."""
        self.go_on(-1)

    # --------------------------------------------------------------------------------------------- metrics

    def append(self, metrics: Mapping[str, float]) -> None:
        """Add one step's metrics, whole or not at all; "step" must be among them.

        Raises:
            InvalidInputError: "step" is missing, or a value is no number.
            CheckpointError: it cannot be written (disk full); what was there stays.
        """
        _check(metrics)
        with self._named_errors("append a step's metrics to"):
            self._log.append([metrics])  # before the checkpoint, which go_on() compares it with

    def read(self) -> list[Metrics]:
        """Return the metrics of every step, in order; NaN where a value was not finite.

        Raises:
            CheckpointError: they cannot be read, or are damaged.
        """
        with self._named_errors("read"):
            lines = self._log.read()
        return [{name: float("nan") if value is None else value for name, value in line.items()} for line in lines]

    def has_checkpoint(self) -> bool:
        """Return True if the run can continue from a checkpoint; False if it ended before its first.

        Raises:
            CheckpointError: steps were done, or the model is there, and the checkpoint is gone.
        """
        if (self.checkpoint / "manifest.json").exists():
            return True
        if (done := self._num_done()) or self.model.exists():
            what = f"the metrics of {done} steps" if done else "a trained model"
            raise CheckpointError(
                f"{self.path} has {what} and no checkpoint; put {self.checkpoint} back, "
                "or start again with another --output"
            )
        return False

    def _num_done(self) -> int:
        """Return the number of GRPO steps in the metrics; step 0 is the evaluation before the first."""
        with self._named_errors("read"):
            return self._log.num_of_steps()

    def go_on(self, step: int) -> None:
        """Drop the metrics after ``step``, the step of the checkpoint from which the run continues (-1: no step yet).

        Raises:
            CheckpointError: the metrics of a step up to it are missing or there twice: nothing has changed. Or the
                folder cannot be written.
            InvalidInputError: the requested number of steps is smaller; nothing has changed.
        """
        if step > self._config.steps:
            raise InvalidInputError(
                f"--steps must be at least {step}, the steps that {self.path} has done, got {self._config.steps}"
            )
        with self._named_errors("write to"):
            self._log.replace(self._log.until(step))
            write_file(self._record, self._config.to_json())

    # --------------------------------------------------------------------------------------------- picture

    def draw(self) -> Path:
        """Write reward.png, 1200 x 900 pixels, and return its path."""
        image = _draw(self.read())
        with self._named_errors("write reward.png to"):
            write_file(self.picture, image)
        return self.picture

    # ---------------------------------------------------------------------------------------------- checks

    def _check_unused(self) -> None:
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not self._record.exists():
            raise InvalidInputError(f"{self.path} exists and is not a quickstart run; use another --output")
        described = self._described()  # reads the record: a foreign run.json is no run's
        if self.model.exists() or (self.checkpoint / "manifest.json").exists() or self._num_done():
            raise InvalidInputError(
                f"{self.path} holds another run ({described}); add --resume to continue it, or use another --output"
            )

    def _check_same_run(self, config: QuickstartConfig) -> None:
        if not self._record.exists():
            is_free = not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))
            advice = "leave out --resume to start one there" if is_free else "give the --output of a run"
            raise CheckpointError(f"{self.path} holds no run to resume: it has no run.json; {advice}")
        if different := QuickstartConfig.read(self._record).differences(config):
            raise InvalidInputError(
                f"cannot resume {self.path}: it holds a run with {'; '.join(different)}; "
                "give the same options, or another --output without --resume"
            )

    def _described(self) -> str:
        config = QuickstartConfig.read(self._record)
        model = "its own model" if config.model is None else str(config.model)
        return f"{model}, seed {config.seed}, {self._num_done()} of {config.steps} steps done"

    def _taken(self) -> int:
        """Return the descriptor that holds the folder."""
        try:
            return take_folder(self.path)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self.path} is in use by another process; wait for it to end, or use another --output"
            ) from error

    @contextlib.contextmanager
    def _named_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot {action} {self.path}: {error.strerror or error}; what was there before is intact. "
                "See to the space and the permissions there, or use another --output"
            ) from error


def _check(metrics: Mapping[str, float]) -> None:
    if "step" not in metrics:
        raise InvalidInputError(f"a step's metrics need 'step', got {sorted(metrics)}")
    for name, value in metrics.items():
        if not isinstance(value, int | float):
            raise InvalidInputError(f"the metric {name!r} must be a number, got {value!r}")


def _draw(steps: list[Metrics]) -> bytes:
    """Return a PNG with the learning curve above and the seconds by phase below."""
    figure = _figure()
    learning, spending = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_learning(learning, steps)
    _draw_spending(spending, steps)
    for axes in (learning, spending):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=_DOTS_PER_INCH)
    return image.getvalue()


def _draw_learning(axes: Any, steps: list[Metrics]) -> None:
    axes.plot(*_series(steps, "reward"), color="tab:blue", alpha=0.8, label="reward, sampled on training problems")
    axes.plot(*_series(steps, "accuracy"), "o-", color="tab:orange", label="accuracy, greedy on held-out problems")
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of right answers")
    axes.legend(loc="lower right", frameon=False)


def _draw_spending(axes: Any, steps: list[Metrics]) -> None:
    shown = [metrics for metrics in steps if all(f"{phase}_s" in metrics for phase in PHASES)]
    seconds = [[metrics[f"{phase}_s"] for metrics in shown] for phase in PHASES]
    axes.stackplot([metrics["step"] for metrics in shown], seconds, labels=PHASES, alpha=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, ncols=len(PHASES))  # above the axes


def _series(steps: list[Metrics], name: str) -> tuple[list[float], list[float]]:
    shown = [metrics for metrics in steps if name in metrics]
    return [metrics["step"] for metrics in shown], [metrics[name] for metrics in shown]


def _figure() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", needed_for="drawing reward.png", extra="quickstart") from error
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would keep the figure and look for a screen
    return figure
