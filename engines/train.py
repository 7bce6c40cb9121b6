"""``TrainEngine``: runs the methods of the user's module, and ``train_batch``, on workers."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_args

import torch
from torch import Tensor

from rlcore.arguments import FLAG, MAPPING, NUMBER, TEXT, WHOLE, Kind, optional, takes
from rlcore.engines.batch import LAYOUT, Batch, check_values, loss_mask_of, on_host, padded, separated, to_packed
from rlcore.engines.checkpointing import CheckpointedEngine
from rlcore.engines.executors.base import TrainExecutor
from rlcore.engines.executors.train_options import BatchOptions, LossOptions, ScoreOptions, StepOptions
from rlcore.engines.executors.worker import Worker
from rlcore.engines.mismatch_cause import mismatch_warning
from rlcore.engines.need_parallel import (
    Gather,
    check_gather,
    gathered,
    has_split_sequences,
    in_row_order,
    split_arguments,
)
from rlcore.engines.rank_batch import SCORED, WEIGHT, rank_batches
from rlcore.engines.residency import Move, State
from rlcore.engines.weight_sync.engines import WeightSync, as_targets
from rlcore.engines.weight_sync.options import Checksums, RoundOptions, staging_bytes_of
from rlcore.engines.weight_sync.transports.base import Route
from rlcore.errors import InvalidInputError, RlcoreError, UnsupportedError, one_line
from rlcore.kernels.losses.token_weights import Mode
from rlcore.kernels.losses.token_weights import token_weights as make_token_weights
from rlcore.nn import TrainModule
from rlcore.parallel_plans import Sizes
from rlcore.routing.replay import check_routes
from rlcore.sequence_input import SequenceInput
from rlcore.types import SyncReport
from rlcore.weights.adapters import adapted_layers, check_adapters
from rlcore.weights.view import Adapters

if TYPE_CHECKING:
    from rlcore.engines.inference import InferenceEngine

R = TypeVar("R")
_log = logging.getLogger(__name__)
_MAX_TOKENS = 16384
_BATCH_KINDS = {
    "batch": Kind("a dict of tensors, as rlcore.collate() makes,", lambda value: hasattr(value, "items")),
    "max_tokens_per_micro_batch": WHOLE,
    "temperature": NUMBER,
}
_ADAPTERS = Kind("'merged', 'base' or 'only'", lambda value: value in get_args(Adapters))
_LOSS_KINDS = _BATCH_KINDS | {
    "loss_fn": Kind("a function (logprob, entropy, per_token) -> (value, stats), such as ppo_clip(),", callable),
    "max_length": optional(WHOLE),
    "with_entropy": FLAG,
}


class TrainEngine(CheckpointedEngine):
    """Trains a module. Any method of its class can be called on the engine: ``engine.train_step(x)``.

    Args:
        module: made under ``rlcore.meta_device()``.
        executor: name of a registered train executor.
    """

    kind: ClassVar[str] = "train"
    tags: ClassVar[tuple[str, ...]] = ("weights", "optimizer", "grads")

    def __init__(self, module: TrainModule, *, executor: str = "fsdp2") -> None:
        _check_module(module)
        self._module_class = type(module)
        self._module = module
        self._weight_sync = WeightSync()
        self._sizes = Sizes()
        self._has_warned_of_mismatch = False
        self._changes_given: int | None = None
        super().__init__(executor)

    def build(
        self,
        *,
        replicas: int = 1,
        data_parallel_size: int = 1,
        sequence_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        **options: Any,
    ) -> Self:
        """Start the workers and load the weights; see ``Engine.build``.

        There are ``replicas * data_parallel_size * sequence_parallel_size * tensor_parallel_size`` workers.

        Args:
            replicas: copies of the weights (HSDP), each sharded over the workers of one.
            data_parallel_size: parts of each batch that the workers of one replica compute at a time.
            sequence_parallel_size: workers that share each part, every micro-batch cut into as many runs of tokens
                (Ulysses): for sequences that are too long for one device. It must divide the attention's query heads.
            tensor_parallel_size: neighbouring workers that compute the same tokens, each with its part of every large
                matrix, by the plan that transformers has for the model. It must divide the heads of queries, and of
                keys and values.
            expert_parallel_size: neighbouring workers of one replica that have the experts of a mixture among them;
                tokens travel to their experts. A multiple of ``tensor_parallel_size`` that divides the workers of a
                replica and the experts. It adds no workers.
            options: those of ``Engine.build``, and of the executor: for "fsdp2" the fields of
                ``rlcore.engines.fsdp2.sharding.Sharding``, for "deepspeed" those of
                ``rlcore.engines.deepspeed.options.ZeroOptions``.
        """
        sizes = {
            "replicas": replicas,
            "sequence_parallel_size": sequence_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "expert_parallel_size": expert_parallel_size,
        }
        for name, value in (sizes | {"data_parallel_size": data_parallel_size}).items():
            if type(value) is not int or value < 1:
                raise InvalidInputError(f"{name} must be a whole number of at least 1, got {value!r}")
        in_replica = data_parallel_size * sequence_parallel_size * tensor_parallel_size
        divides = expert_parallel_size % tensor_parallel_size == 0 == in_replica % expert_parallel_size
        if expert_parallel_size > 1 and not divides:
            raise InvalidInputError(
                f"expert_parallel_size={expert_parallel_size} must be a multiple of "
                f"tensor_parallel_size={tensor_parallel_size}, and divide the {in_replica} workers of a replica: "
                "data_parallel_size * sequence_parallel_size * tensor_parallel_size"
            )
        # a size of 1 is no option that an executor has to know
        options |= {name: value for name, value in sizes.items() if value > 1}
        self._sizes = Sizes(tensor_parallel_size, expert_parallel_size, sequence_parallel_size)
        return super().build(data_parallel_size=replicas * in_replica // tensor_parallel_size, **options)

    def _check(self, options: dict[str, Any], python: str | os.PathLike[str] | None) -> None:
        self._executor_class.check_packages()
        if self._sizes.tensor > 1:
            self._check_takes_tensor_parallelism(options)
        if self._sizes.sequences > 1:
            self._module.check_sequence_parallel(self._sizes.sequences)
        if self._sizes.tensor > 1 or self._sizes.experts > 1:
            self._module.check_split(self._sizes)

    def _check_takes_tensor_parallelism(self, options: dict[str, Any]) -> None:
        """Check options with ``tensor_parallel_size``, which ``Engine.build`` keeps: it places the workers by it."""
        options_class = self._executor_class.options_class
        if options_class is None or "tensor_parallel_size" not in {one.name for one in fields(options_class)}:
            raise UnsupportedError(
                f"tensor_parallel_size={self._sizes.tensor} for executor {self._executor_name!r}",
                "its workers do not share matrices; executor='fsdp2' can",
            )
        options_class(**self._of_executor(options))

    def _of_executor(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | ({"tensor_parallel_size": self._sizes.tensor} if self._sizes.tensor > 1 else {})

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._weight_sync.close()

    close.__doc__ = CheckpointedEngine.close.__doc__

    @property
    def num_changes(self) -> int:
        """A number that grows whenever the weights may have been changed."""
        return self._num_changes

    @property
    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._module.parameters())

    @property
    def _has_adapters(self) -> bool:
        return bool(adapted_layers(self._module))

    @property
    def _refill(self) -> str:
        # A state dict of adapters does not have the base weights.
        return "load(path) or restart()" if self._has_adapters else "load(path), load_state_dict(state) or restart()"

    def _planned(self, move: Move, tags: tuple[str, ...]) -> dict[str, State]:
        asks = move is Move.META and "optimizer" in (tags or self.tags) and self._residency.is_absent("optimizer")
        if asks and self.state["optimizer"] is not State.RELEASED and any(self._call(TrainExecutor.has_optimizer)):
            self._residency.declare_present("optimizer")  # a method of the module has made one since the build
        return super()._planned(move, tags)

    def _build_workers(self, options: dict[str, Any]) -> None:
        # Each worker gets a copy of the meta module, so that restart() has the original.
        self._num_changes += 1
        own = self._of_executor(options)
        has_optimizer = self._call(TrainExecutor.build, copy.deepcopy(self._module), torch.initial_seed(), **own)
        if not all(has_optimizer):
            self._residency.declare_absent("optimizer")
        if self._last_checkpoint is not None:
            self.load(self._last_checkpoint)

    # ------------------------------------------------------------------------------- the module's methods

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        # Called only for names the engine itself does not have.
        if name.startswith("_") or not callable(getattr(self._module_class, name, None)):
            raise AttributeError(f"neither the train engine nor {self._module_class.__name__} has a method {name!r}")
        return partial(self.call, name)

    @takes("call()", name=TEXT)
    def call(self, name: str, *args: object, gather: Gather = "list", **kwargs: object) -> Any:
        """Call the module's method ``name`` on every worker; arguments in ``NeedParallel`` are split among them.

        Args:
            gather: "list" gives one result a rank; "first" rank 0's; "mean" the mean of numbers; "cat" joins tensors,
                lists or dicts of them, in the order of the rows where ``NeedParallel(balance_by=...)`` dealt them out.
                Of workers that have the same arguments (tensor and sequence parallelism), "cat" takes the first one's
                result.
        """
        group = self._built_group()
        check_gather(gather)
        if not callable(getattr(self._module_class, name, None)):
            raise InvalidInputError(f"{self._module_class.__name__} has no method {name!r}")
        self._require("weights", f"{name}()")
        self._num_changes += 1
        num_workers, sizes = len(group.workers), self._sizes
        calls = split_arguments(args, kwargs, num_workers, sizes.sequences, sizes.tensor)
        results = group.call(f"module.{name}", calls)
        if gather != "cat":
            return gathered(name, results, gather)
        alike = sizes.tensor * (1 if has_split_sequences(args, kwargs) else sizes.sequences)
        found = gathered(name, results[::alike], gather)
        return in_row_order(found, args, kwargs, num_workers // (sizes.tensor * sizes.sequences))

    @takes("train()", mode=FLAG)
    def train(self, mode: bool = True) -> TrainEngine:
        """Set training mode, as ``torch.nn.Module.train``."""
        self.call("train", mode)
        return self

    def eval(self) -> TrainEngine:
        """Set evaluation mode."""
        return self.train(False)

    # ------------------------------------------------------------------------------------------- training

    @takes("train_batch()", **_LOSS_KINDS, max_grad_norm=optional(NUMBER))
    def train_batch(
        self,
        batch: Batch,
        loss_fn: Callable[..., Any],
        *,
        token_weights: Mode = "token-mean",
        max_length: int | None = None,
        max_tokens_per_micro_batch: int = _MAX_TOKENS,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
        with_entropy: bool = True,
    ) -> dict[str, float]:
        """Take one optimizer step on the whole batch. A batch without a token to train on takes it too, with a warning.

        The loss is ``sum_t token_weight[t] * loss_fn(...)[t]`` over the batch, however it is cut into micro-batches.

        Args:
            batch: see ``rlcore.engines.batch``; ``loss_mask`` is 1 for the tokens that are trained on (all but each
                first token when absent). Every other entry is given to ``loss_fn`` as ``per_token[name]``.
            loss_fn: ``(logprob, entropy, per_token) -> (value, stats)``, such as ``rlcore.ops.ppo_clip()``.
            token_weights: a mode of ``rlcore.ops.token_weights``.
            max_length: the most tokens of a response; "seq-mean-token-sum-norm" (Dr. GRPO) divides by it.
            max_grad_norm: gradients are scaled down to this norm; None leaves them.
            temperature: the sampler's.
            with_entropy: False does not compute the entropy and passes None to ``loss_fn``.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``num_tokens``, ``lr/<optimizer>`` and the loss's statistics.
            Of a batch with the sampler's log-probs (``rollout_logprobs``, or else ``old_logprobs``) also
            ``mismatch/mean``, ``/p99``, ``/bias`` and ``/effective_sample_size``: how far the trainer's are from them.
            Of a mixture of experts ``expert_load/max_over_mean``, ``/entropy`` and ``/unused``. With ``routed_experts``
            in the batch its routers take those instead of their own.

        Raises:
            InvalidInputError: token ids outside the vocabulary, a NaN on a token that is trained on, or a
                ``loss_mask`` of other values than 0 and 1.
            StateError: weights, optimizer or gradients are not on the device.
        """
        for tag in self.tags:
            self._require(tag, "train_batch()")
        options = StepOptions(
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            max_grad_norm=max_grad_norm,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        packed, inputs = self._weighted(batch, token_weights, max_length)
        num_tokens = int((packed[WEIGHT] != 0).sum())
        if not num_tokens:
            _log.warning(
                "train_batch() got no token that is trained on: optimizers and schedulers take a step all the same; "
                "leave such a batch out"
            )
        has_moved = self._changes_given not in (None, self._num_changes)  # the policy, by steps after the last sync
        self._num_changes += 1
        metrics: dict[str, float] = self._call_with_batch(TrainExecutor.train_step, packed, inputs, options, loss_fn)
        may_warn = not (has_moved or self._has_warned_of_mismatch)  # it would be the same at each step
        if may_warn and (warning := mismatch_warning(metrics, packed, self._module)):
            self._has_warned_of_mismatch = True
            _log.warning("%s", warning)
        return metrics | {"num_tokens": num_tokens}

    @takes("eval_batch()", **_LOSS_KINDS)
    def eval_batch(
        self,
        batch: Batch,
        loss_fn: Callable[..., Any],
        *,
        token_weights: Mode = "token-mean",
        max_length: int | None = None,
        max_tokens_per_micro_batch: int = _MAX_TOKENS,
        temperature: float = 1.0,
        with_entropy: bool = True,
    ) -> dict[str, float]:
        """Return the loss and statistics that ``train_batch`` would, in evaluation mode; nothing changes.

        Arguments are those of ``train_batch``. Optimizer and gradients may be away.

        Returns:
            ``loss``, ``num_tokens``, the loss's statistics, and those of the sampler's log-probs and of experts.
        """
        self._require("weights", "eval_batch()")
        options = LossOptions(
            max_tokens_per_micro_batch=max_tokens_per_micro_batch, temperature=temperature, with_entropy=with_entropy
        )
        packed, inputs = self._weighted(batch, token_weights, max_length)
        metrics: dict[str, float] = self._call_with_batch(TrainExecutor.evaluate, packed, inputs, options, loss_fn)
        return metrics | {"num_tokens": int((packed[WEIGHT] != 0).sum())}

    def _weighted(
        self, batch: Batch, mode: Mode, max_length: int | None
    ) -> tuple[dict[str, Tensor], Mapping[str, SequenceInput]]:
        """Return the batch packed and checked, with the weight of each token in the loss; and what is beside tokens."""
        tensors, inputs = separated(batch)
        packed = to_packed(tensors)
        if WEIGHT in packed:
            raise InvalidInputError(
                f"a batch cannot have an entry {WEIGHT!r}, which comes of token_weights={mode!r}; to weight tokens "
                "further, multiply in loss_fn by an entry of another name"
            )
        weight_T = make_token_weights(
            mode, loss_mask_of(packed), cu_seqlens=packed["cu_seqlens"], max_length=max_length
        )
        # Checked here and not by the workers: if one refused its part, the others would wait for it.
        check_values(packed, self._module.output_head().weight.shape[0], weight_T != 0)
        check_routes(self._module, packed)
        return packed | {WEIGHT: weight_T}, self._prepared(packed, inputs)

    def _prepared(
        self, packed: Mapping[str, Tensor], inputs: Mapping[str, SequenceInput]
    ) -> Mapping[str, SequenceInput]:
        """Return all that ``hidden_states`` needs beside the tokens."""
        found = self._module.prepare_inputs(packed, inputs)
        if found and self._sizes != Sizes():
            raise UnsupportedError(
                f"a batch with {', '.join(sorted(inputs))} where ranks share sequences or layers ({self._sizes})",
                "vision towers run whole on each rank; build with data parallelism alone, and all other sizes 1",
            )
        return found

    @takes("forward_logprobs()", **_BATCH_KINDS, top_p=NUMBER, top_k=WHOLE)
    def forward_logprobs(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        max_tokens_per_micro_batch: int = _MAX_TOKENS,
    ) -> Tensor:
        """Return the log-probability of each token given those before it, under the sampler's distribution.

        Returns:
            float32 on the host, shaped as ``input_ids``; 0 on first tokens, on padding, and outside ``loss_mask``
            when the batch has one.
        """
        self._require("weights", "forward_logprobs()")
        tensors, given = separated(batch)
        layout = {name: on_host(name, tensors[name]) for name in LAYOUT if name in tensors}
        packed = to_packed(layout)
        options = ScoreOptions(
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
        scored_T = loss_mask_of(packed)
        check_values(packed, self._module.output_head().weight.shape[0], scored_T)
        check_routes(self._module, packed)
        inputs = self._prepared(packed, given)
        logprob_T: Tensor = self._call_with_batch(TrainExecutor.score, packed | {SCORED: scored_T}, inputs, options)
        return logprob_T if "cu_seqlens" in layout else padded(logprob_T, layout)

    def _call_with_batch(
        self,
        method: Callable[..., R],
        packed: dict[str, Tensor],
        inputs: Mapping[str, SequenceInput],
        options: BatchOptions,
        *args: object,
    ) -> R:
        """Call ``method(rank's batch, *args, options)`` on every worker; return the result, the same on all."""
        group = self._built_group()
        batches = rank_batches(
            packed,
            group.workers[0].context.world_size,
            options.max_tokens_per_micro_batch,
            sequence_parallel_size=self._sizes.sequences,
            tensor_parallel_size=self._sizes.tensor,
            inputs=inputs,
        )
        calls: list[tuple[Any, dict[str, Any]]] = [
            ((batches[worker.context.rank], *args, options), {}) for worker in group.workers
        ]
        try:
            result: R = group.call(method.__name__, calls)[0]
        except RlcoreError as error:
            if error.is_out_of_memory:
                error.add_note(self._advice(packed, method is TrainExecutor.train_step, options))
            raise
        return result

    def _advice(self, packed: dict[str, Tensor], trains: bool, options: BatchOptions) -> str:
        """Return what fits instead of a step that did not, from a plan of it."""
        from rlcore.engines.memory_plan.advice import Failed, advice  # takes a while, and is seldom needed

        lengths = packed["cu_seqlens"].diff().tolist()
        failed = Failed(lengths, options.max_tokens_per_micro_batch, trains, self._executor_name, self._options)
        try:
            report, facts = self.memory_report()[0], self._call(Worker.planned_device)[0]
        except RlcoreError as error:
            return f"No plan of this step could be made: {one_line(error)}"
        return advice(self._module, failed, facts, report, len(self._built_group().workers))

    # --------------------------------------------------------------------------------------------- weights

    def sync_weights(
        self,
        target: InferenceEngine | Sequence[InferenceEngine],
        *,
        version: int | None = None,
        route: Route | None = None,
        staged: bool = False,
        verify: bool = False,
        delta: bool = False,
        checksums: Checksums = "sample",
        staging_bytes: int | None = None,
        slab_bytes: int | None = None,
        timeout_s: float = 120.0,
    ) -> SyncReport:
        """Give these weights to ``target``, one engine or several: afterwards all of them serve these, or none does.

        Args:
            version: number of the new weights, which completions name (``version_spans``); None is one more than the
                targets'. Numbers of your own, such as those of steps, may also decrease: they are not compared.
            route: "local", "direct", "packed", "collective" or "relayed" (docs/weight_sync.md); None takes the first
                that works.
            staged: the targets keep their old weights whole until they have all new ones, in twice the memory.
            verify: compare every byte with what the target's own loader makes of the same weights; slow, and not with
                ``staged``: that loader writes into the weights that are served.
            delta: tell only what has changed since the targets' version, for slow links; the trainer keeps a copy of
                what it sent. Where that cannot be done all is told, and ``SyncReport.why_dense`` says why.
            checksums: on "packed" and "collective": of no bucket, one in 16, or all.
            staging_bytes: size of each of the two staging buffers of a trainer's worker; None chooses.
            slab_bytes: the former name of ``staging_bytes``, deprecated.
            timeout_s: the longest that the sync may take.

        Raises:
            StateError: the weights of either side are not on the device, or another thread is syncing this trainer's.
            UnsupportedError: no route, or not the one asked for, can be taken; says why.
            SyncError: the models differ, or the sync failed; the message or a note says what the targets hold.
        """
        staging_bytes = staging_bytes_of(staging_bytes, slab_bytes)
        targets = as_targets(target)
        self._require("weights", "sync_weights()")
        group = self._built_group()
        new_version = max(one.version for one in targets) + 1 if version is None else version

        def options(is_same: bool) -> RoundOptions:
            return RoundOptions(
                version=new_version,
                route=route,
                is_staged=staged,
                is_verified=verify,
                is_delta=delta,
                checksums=checksums,
                staging_bytes=staging_bytes,
                is_same=is_same,
                timeout_s=timeout_s,
            )

        report = self._weight_sync.run(group, targets, self._num_changes, options)
        self._changes_given = self._num_changes
        return report

    p2p_weight_sync = sync_weights

    @takes("state_dict()", adapters=_ADAPTERS)
    def state_dict(self, *, adapters: Adapters = "merged") -> dict[str, Tensor]:
        """Return every weight by checkpoint name, copied to the host.

        Args:
            adapters: "merged" adds adapters to the weights; "base" gives the weights without them, "only" the adapters.
        """
        self._require("weights", "state_dict()")
        state: dict[str, Tensor] = self._call(TrainExecutor.state_dict, adapters)[0]
        return state

    @takes("load_state_dict()", state=Kind("a mapping of tensors, as state_dict() gives,", MAPPING.has))
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite every weight; of a module with adapters, every adapter.

        The names must be those of ``state_dict()``, or of ``state_dict(adapters="only")`` for a module with adapters.
        """
        self._require("weights", "load_state_dict()", may_be_empty=not self._has_adapters)
        self._num_changes += 1
        self._call(TrainExecutor.load_state_dict, state)
        self._residency.set("weights", State.LOADED)


def _check_module(module: TrainModule) -> None:
    if not isinstance(module, TrainModule):
        raise InvalidInputError(
            f"TrainEngine takes a rlcore.nn.TrainModule, got {type(module).__name__}; derive its class from "
            "rlcore.nn.TrainModule or, for transformers models, rlcore.nn.HuggingFaceTrainModule"
        )
    check_adapters(module)
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        raise InvalidInputError(
            f"the parameters of {type(module).__name__} must be on the meta device, but {real[0]} is not; "
            "make the module inside `with rlcore.meta_device():`"
        )
