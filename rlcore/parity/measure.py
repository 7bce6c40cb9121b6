"""Measures how far a trainer's log-probabilities are from a sampler's, and where in the model they part.

The sampler runs first and leaves its device: a model needs room for one engine, not for two.

Letters: N completions, S tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.engines.batch import collate
from rlcore.engines.fsdp2.sharding import DTYPES
from rlcore.engines.inference import InferenceEngine
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.engines.train import TrainEngine
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.meta import meta_device
from rlcore.parity.layers import PartDifference, compare, first_difference, largest_growth
from rlcore.parity.policy import probed_class
from rlcore.parity.statistics import LogProbAgreement, PositionDifference, by_position
from rlcore.routing.routers import ROUTES, routers_of

_PROMPT_TOKENS, _SAMPLES = 16, 4
_RETURNING_ROUTES = ("hf", "vllm", "sglang")
_PLAIN_BUILD = {"vllm": {"enforce_eager": True}, "sglang": {"disable_cuda_graph": True}}
"""The options with which an executor's model is called part by part: compiled or captured code calls none."""
_MOST_PROBED = 128
"""Tokens of the sequence whose parts are compared: all results of all layers come to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityOptions:
    """The options of ``measure``."""

    train: str | None = None
    """The device of both engines; None takes the default one."""
    infer: str = "hf"
    """The inference executor."""
    dtype: str = "bfloat16"
    """The dtype of the trainer, and of the sampler unless its options have another."""
    sequences: int = 64
    tokens: int = 64
    """Tokens that are sampled in each sequence."""
    temperature: float = 1.0
    layers: bool = True
    """Compare the parts of the model, too."""
    infer_options: Mapping[str, Any] = field(default_factory=dict)
    """Build options of the inference engine."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidInputError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """The result of ``measure``."""

    model: str
    device: str
    sampler: str
    dtype: str
    infer_options: dict[str, Any]
    agreement: LogProbAgreement
    """As in a run: of a mixture of experts with routing replay."""
    without_replay: LogProbAgreement | None
    """The agreement without replay: the trainer selects experts by itself. None for a dense model."""
    routes_apart: float | None
    """The share of (token, layer) for which trainer and sampler select different experts; None for a dense model."""
    positions: list[PositionDifference]
    layers: list[PartDifference]
    first: PartDifference | None
    """The first part that differs at all."""
    largest: PartDifference | None
    """The part at which the difference grows most."""

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        found = asdict(self)
        found["agreement"]["lost"] = self.agreement.lost
        return found


def measure(
    folder: Path, options: ParityOptions, prompts: Sequence[str] | None = None, say: Callable[[str], None] = print
) -> ParityReport:
    """Sample from a model, score the same tokens by the trainer, and compare.

    Args:
        prompts: texts; None takes random tokens.
        say: told what is done next.

    Raises:
        CheckpointError: the folder has no causal language model.
        InvalidInputError: an option that an engine does not take.
    """
    model = check_model_folder(folder)
    with meta_device():
        module = probed_class(folder).from_pretrained(folder)
    has_experts = bool(routers_of(module))
    given = _prompts(model.vocab_size, options) if prompts is None else list(prompts)
    outputs, theirs = _sampled(folder, options, given, has_experts, say)
    say("scoring them by the trainer")
    with TrainEngine(module) as train:
        train.build(devices=options.train, dtype=options.dtype)
        device = train.device
        batch = collate(outputs)
        apart = _apart(train, batch, options)
        plain = {name: entry for name, entry in batch.items() if name != ROUTES}
        replays = ROUTES in batch
        without = LogProbAgreement.of(_apart(train, plain, options).flatten()) if replays else None
        routes_apart = _routes_apart(train, outputs) if replays else None
        ours = train.call("part_results", _probed(outputs), gather="first") if theirs else {}
    parts = compare(ours, theirs)
    return ParityReport(
        model=folder.name,
        device=device,
        sampler=options.infer,
        dtype=options.dtype,
        infer_options=dict(options.infer_options),
        agreement=LogProbAgreement.of(apart.flatten()),
        without_replay=without,
        routes_apart=routes_apart,
        positions=by_position(apart),
        layers=parts,
        first=first_difference(parts),
        largest=largest_growth(parts),
    )


def _prompts(vocab_size: int, options: ParityOptions) -> list[list[int]]:
    count = -(-options.sequences // _SAMPLES)
    return torch.randint(vocab_size, (count, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()


def _build(folder: Path, options: ParityOptions, **more: Any) -> InferenceEngine:
    engine = InferenceEngine(folder, executor=options.infer)
    return engine.build(**{"devices": options.train, "dtype": options.dtype, **options.infer_options, **more})


def _sampled(
    folder: Path, options: ParityOptions, prompts: Sequence[Any], has_experts: bool, say: Callable[[str], None]
) -> tuple[list[RequestOutput], dict[str, Tensor]]:
    """Return the completions, and the results of the sampler's parts: none if they cannot be had, or are not asked."""
    say(f"sampling {options.sequences * options.tokens} tokens by {options.infer}")
    each = -(-options.sequences // len(prompts))
    params = {"n": each, "max_tokens": options.tokens, "temperature": options.temperature, "seed": 1}
    plain = _PLAIN_BUILD.get(options.infer)
    with _returning_routes(folder, options, say) if has_experts else _build(folder, options) as infer:
        outputs = infer.generate(prompts, params | {"ignore_eos": True})
        if not options.layers:
            return outputs, {}
        if plain is None:
            say("looking inside the sampler")
            return outputs, _activations(infer, _probed(outputs), say)
    say("looking inside the sampler, which is built again without compiled code")
    with _build(folder, options, **plain) as infer:
        return outputs, _activations(infer, _probed(outputs), say)


def _returning_routes(folder: Path, options: ParityOptions, say: Callable[[str], None]) -> InferenceEngine:
    """Return a sampler that returns the experts of each token, if it can."""
    if options.infer in _RETURNING_ROUTES:
        try:
            return _build(folder, options, enable_return_routed_experts=True)
        except UnsupportedError as error:
            say(f"routes are not replayed: {error}")
    return _build(folder, options)


def _probed(outputs: Sequence[RequestOutput]) -> list[int]:
    """Return the sequence whose parts are compared."""
    return (outputs[0].prompt_token_ids + outputs[0].outputs[0].token_ids)[:_MOST_PROBED]


def _activations(infer: InferenceEngine, sequence: list[int], say: Callable[[str], None]) -> dict[str, Tensor]:
    try:
        return infer.activations(sequence)
    except UnsupportedError as error:
        say(f"the parts of the model are not compared: {error}")
        return {}


def _apart(train: TrainEngine, batch: Mapping[str, Tensor], options: ParityOptions) -> Tensor:
    """Return the differences [N, S]; all completions have S tokens."""
    mask = batch["loss_mask"]
    scored = train.forward_logprobs(batch, temperature=options.temperature)
    return (scored.double() - batch["old_logprobs"].double())[mask].view(len(mask), options.tokens)


def _routes_apart(train: TrainEngine, outputs: Sequence[RequestOutput]) -> float:
    differing: list[Tensor] = []
    layers = [router.layer for router in routers_of(train._module)]
    for output in outputs[:8]:
        completion = output.outputs[0]
        theirs = completion.routed_experts
        if theirs is None:
            continue
        ids = (output.prompt_token_ids + completion.token_ids)[: len(theirs)]
        ours = train.call("own_routes", ids, gather="first")
        differing.append((ours.sort(-1).values != theirs.sort(-1).values).any(-1)[:, layers].flatten())
    return float(torch.cat(differing).double().mean())
