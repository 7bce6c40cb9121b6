"""The configuration of ``rlcore train``: what is trained, on what, by which algorithm, and on which devices."""

# ruff: noqa: RUF009 (setting() makes a dataclasses.field)
from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rlcore import ops
from rlcore.arguments import AT_LEAST_0, COUNT, FLAG, WHOLE, WHOLE_FROM_0, Kind, optional
from rlcore.configuration_file import FieldError, Section, setting
from rlcore.errors import InvalidInputError, one_line

LOSSES = ("cispo", "cpgd", "decoupled_ppo", "dppo", "gmpo", "gspo", "ppo_clip", "reinforce", "sapo", "vespo")
SCHEDULES = ("constant", "linear", "cosine")
COMPARED = ("model", "seed", "data", "algorithm", "rollout")
"""The fields that make a run what it is."""
_BEFORE = {"rollout.pacing": False}
"""Values of fields that older configurations lack: what their runs did."""
_FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_ABOVE_0 = Kind("a number above 0", lambda value: AT_LEAST_0.has(value) and value > 0)
_NAME = Kind("a text that is not empty", lambda value: isinstance(value, str) and value.strip() != "")
FUNCTION = Kind(
    'a function as "module:name"', lambda value: isinstance(value, str) and _FUNCTION_NAME.fullmatch(value) is not None
)
_DATA = Kind(
    'a file "NAME.jsonl", or a function as "module:name"',
    lambda value: isinstance(value, str) and (value.endswith(".jsonl") or FUNCTION.has(value)),
)
_DEVICES = Kind(
    'the name of a device such as "cuda:1", or a list of them',
    lambda value: _NAME.has(value) or (isinstance(value, list) and value != [] and all(map(_NAME.has, value))),
)
_SEED = Kind("a whole number in [0, 2**63)", lambda value: WHOLE.has(value) and 0 <= value < 2**63)
_TEMPERATURE = Kind("a number of at least 0.01", lambda value: AT_LEAST_0.has(value) and value >= 0.01)
_TEMPERATURE_OR_0 = Kind("0 or a number of at least 0.01", lambda value: value == 0 or _TEMPERATURE.has(value))
_OPTIONS = Kind(
    "a mapping of names to values",
    lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value),
)


def one_of(*names: str) -> Kind:
    return Kind(f"one of {', '.join(names)}", lambda value: value in names)


@dataclass(frozen=True, kw_only=True)
class DataSection(Section):
    """The items, and what is asked of an answer."""

    train: str = setting(..., _DATA)
    """A file with one JSON object a line, each with a "prompt", or a function that returns a list of items."""
    reward: str | None = setting(None, optional(FUNCTION))
    """``reward(item, text) -> float``; needed but with ``rollout.workflow``."""
    held_out: str | None = setting(None, optional(_DATA))
    """Items that are never trained on, for evaluation."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSection(Section):
    """How a batch is learned from."""

    loss: str = setting("decoupled_ppo", one_of(*LOSSES))
    """A factory of ``rlcore.ops``."""
    loss_options: dict[str, Any] = setting(dict, _OPTIONS)
    """Its arguments, such as {clip_high: 0.28}."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = setting("grpo", one_of("grpo", "dr_grpo", "rloo"))
    """The mode of ``rlcore.ops.group_advantage``."""
    minibatches: int = setting(1, COUNT)
    """Optimizer steps that a batch is cut into."""
    learning_rate: float = setting(1e-6, _ABOVE_0)
    schedule: str = setting("constant", one_of(*SCHEDULES))
    """How the rate goes to 0 until the last step, after ``warmup_steps``."""
    warmup_steps: int = setting(0, WHOLE_FROM_0)
    """Optimizer steps in which the rate rises from 0."""
    weight_decay: float = setting(0.01, AT_LEAST_0)
    max_grad_norm: float | None = setting(1.0, optional(_ABOVE_0))

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            getattr(ops, self.loss)(**self.loss_options)
        except (TypeError, InvalidInputError) as error:
            raise FieldError("loss_options", f"are not those of {self.loss}: {one_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class RolloutSection(Section):
    """How episodes are sampled, and how stale they may be."""

    batch_size: int = setting(32, COUNT)
    """Episodes (groups of samples of one item) in a batch."""
    samples: int = setting(8, COUNT)
    """Samples of an item. A single one has no others to compare with: its advantage is its reward."""
    max_tokens: int = setting(512, COUNT)
    temperature: float = setting(1.0, _TEMPERATURE)
    max_staleness: int = setting(1, WHOLE_FROM_0)
    """0 is synchronous training."""
    pacing: bool = setting(True, FLAG)
    """Run ahead only as far as keeps the trainer from waiting; False: as far as ``max_staleness`` allows."""
    max_concurrent: int | None = setting(None, optional(COUNT))
    drop_equal_groups: bool = setting(False, FLAG)
    """Reject the episodes whose rewards are all equal, and take others (dynamic sampling)."""
    workflow: str | None = setting(None, optional(FUNCTION))
    """``workflow(config) -> Workflow``, in place of one prompt with ``samples`` answers."""
    reward_processes: int = setting(0, WHOLE_FROM_0)
    """Processes that compute rewards, each call with a deadline; 0 computes them in the event loop."""
    reward_timeout_s: float = setting(15.0, _ABOVE_0)
    episode_timeout_s: float = setting(3600.0, _ABOVE_0)


class _EngineSection(Section):
    """An engine: ``options`` has what no field is for."""

    options: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if twice := self.options.keys() & {field.name for field in dataclasses.fields(self)}:  # type: ignore[arg-type]
            name = min(twice)
            raise FieldError(f"options.{name}", f"is no option: {name} is a field beside options")


@dataclass(frozen=True, kw_only=True)
class TrainerSection(_EngineSection):
    """The train engine."""

    executor: str = setting("fsdp2", _NAME)
    devices: str | list[str] | None = setting(None, optional(_DEVICES))
    launcher: str | None = setting(None, optional(_NAME))
    data_parallel_size: int = setting(1, COUNT)
    max_tokens_per_micro_batch: int = setting(16384, COUNT)
    options: dict[str, Any] = setting(dict, _OPTIONS)
    """Further arguments of ``TrainEngine.build``."""


@dataclass(frozen=True, kw_only=True)
class SamplerSection(_EngineSection):
    """The inference engines. Each entry of ``replicas`` engines fails alone."""

    executor: str = setting("hf", _NAME)
    devices: str | list[str] | None = setting(None, optional(_DEVICES))
    """Dealt out evenly to the replicas."""
    launcher: str | None = setting(None, optional(_NAME))
    replicas: int = setting(1, COUNT)
    tensor_parallel_size: int = setting(1, COUNT)
    options: dict[str, Any] = setting(dict, _OPTIONS)
    """Further arguments of ``InferenceEngine.build``."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSection(Section):
    """The mean reward of one answer to each item of ``data.held_out``."""

    every: int = setting(10, COUNT)
    """Steps from one to the next; also before the first step and after the last."""
    temperature: float = setting(0.0, _TEMPERATURE_OR_0)


@dataclass(frozen=True, kw_only=True)
class CheckpointSection(Section):
    every: int = setting(10, COUNT)
    """Steps from one to the next; also after the last step."""


@dataclass(frozen=True, kw_only=True)
class MetricsSection(Section):
    """Where metrics go besides ``metrics.jsonl``."""

    tensorboard: bool = setting(False, FLAG)
    wandb: str | None = setting(None, optional(_NAME))
    """The name of a Weights & Biases project."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """A whole run."""

    model: str = setting(..., _NAME)
    """Folder of a Hugging Face causal language model."""
    output: str = setting("outputs/train", _NAME)
    """Folder of the run."""
    steps: int = setting(100, COUNT)
    """Batches that are trained on, those before a resume included."""
    seed: int = setting(0, _SEED)
    """It decides the order of the items, and seeds torch in this process."""
    placement: str = setting("apart", one_of("apart", "shared"))
    """"apart": trainer and samplers have devices of their own; "shared": they take turns on the trainer's devices."""
    data: DataSection
    algorithm: AlgorithmSection = dataclasses.field(default_factory=AlgorithmSection)
    rollout: RolloutSection = dataclasses.field(default_factory=RolloutSection)
    trainer: TrainerSection = dataclasses.field(default_factory=TrainerSection)
    sampler: SamplerSection = dataclasses.field(default_factory=SamplerSection)
    evaluation: EvaluationSection = dataclasses.field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    metrics: MetricsSection = dataclasses.field(default_factory=MetricsSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.reward is None and self.rollout.workflow is None:
            raise FieldError("data.reward", "is missing; give it, or rollout.workflow")
        sequences = self.rollout.batch_size * self.rollout.samples
        if self.rollout.workflow is None and self.algorithm.minibatches > sequences:
            raise FieldError(
                "algorithm.minibatches",
                f"must be at most the {sequences} answers of a batch (rollout.batch_size x rollout.samples), "
                f"got {self.algorithm.minibatches}",
            )
        if self.rollout.workflow is None and self.rollout.drop_equal_groups and self.rollout.samples == 1:
            raise FieldError(
                "rollout.samples",
                "must be at least 2 with drop_equal_groups, which would take other items for ever, got 1",
            )
        if self.placement == "shared":
            self._check_shared()
        devices, replicas = self.sampler.devices, self.sampler.replicas
        if replicas > 1 and (not isinstance(devices, list) or len(devices) % replicas):
            raise FieldError(
                "sampler.devices", f"must be a list of as many for each of {replicas} replicas, got {devices!r}"
            )

    def _check_shared(self) -> None:
        if self.rollout.max_staleness:
            raise FieldError(
                "rollout.max_staleness",
                f'must be 0 with placement "shared", where samplers stand still while the trainer trains, '
                f"got {self.rollout.max_staleness}",
            )
        if self.sampler.devices is not None or self.sampler.replicas > 1:
            raise FieldError("sampler", 'takes neither devices nor replicas with placement "shared"')

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def differences(self, earlier: dict[str, Any]) -> list[str]:
        """Return the fields in which this is another run than ``earlier``, which a resume must not change.

        The number of steps, devices and launchers, the folder, and how often is evaluated and saved may change.
        """
        now, before = _compared(self.plain()), _BEFORE | _compared(earlier)
        return [
            f"{name} ({before.get(name)!r}, now {now.get(name)!r})"
            for name in now | before
            if now.get(name) != before.get(name)
        ]


def _compared(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``COMPARED``, those of sections as "section.field"."""
    found: dict[str, Any] = {}
    for name in COMPARED:
        value = plain[name]
        found |= {f"{name}.{field}": one for field, one in value.items()} if isinstance(value, dict) else {name: value}
    return found
