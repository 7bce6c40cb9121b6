"""``TrainEngine``: runs the methods of the user's module, and ``train_batch``, on workers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_args

import torch
from torch import Tensor

from rlcore.arguments import FLAG, MAPPING, NUMBER, TEXT, WHOLE, Kind, optional, takes
from rlcore.engines.batch import to_packed
from rlcore.engines.checkpointing import CheckpointedEngine
from rlcore.engines.executors.base import TrainExecutor
from rlcore.engines.fsdp2.micro_batch import check_finite, check_tokens, shares
from rlcore.engines.fsdp2.step import SCORED, WEIGHT, LossOptions, ScoreOptions, StepOptions
from rlcore.engines.need_parallel import Gather, check_gather, gathered, in_order_of_rows, split_arguments
from rlcore.engines.residency import State
from rlcore.engines.weight_sync.engines import WeightSync, as_targets
from rlcore.engines.weight_sync.options import Checksums, RoundOptions, staging_bytes_of
from rlcore.engines.weight_sync.transports.base import Route
from rlcore.errors import InvalidInputError
from rlcore.kernels.token.weights import Mode
from rlcore.kernels.token.weights import token_weights as make_token_weights
from rlcore.nn import TrainModule
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
        super().__init__(executor)

    def build(self, *, replicas: int = 1, data_parallel_size: int = 1, **options: Any) -> Self:
        """Start the workers and load the weights, sharded over ``data_parallel_size`` of them; see ``Engine.build``.

        Args:
            replicas: copies of the sharded weights (HSDP); there are ``replicas * data_parallel_size`` workers.
            options: of ``Engine.build``, and of the executor: for "fsdp2" those of ``engines.sharding.Sharding``.
        """
        for name, value in (("replicas", replicas), ("data_parallel_size", data_parallel_size)):
            if type(value) is not int or value < 1:
                raise InvalidInputError(f"{name} must be a whole number of at least 1, got {value!r}")
        return super().build(data_parallel_size=replicas * data_parallel_size, replicas=replicas, **options)

    @property
    def _has_adapters(self) -> bool:
        return bool(adapted_layers(self._module))

    @property
    def _refill(self) -> str:
        # A state dict of adapters is without the base.
        return "load(path) or restart()" if self._has_adapters else "load(path), load_state_dict(state) or restart()"

    def _build_workers(self, options: dict[str, Any]) -> None:
        # Each worker gets a copy of the meta module, so that restart() has the original.
        self._num_changes += 1
        has_optimizer = self._call(TrainExecutor.build, copy.deepcopy(self._module), torch.initial_seed(), **options)
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
    def call(self, name: str, *args: Any, gather: Gather = "list", **kwargs: Any) -> Any:
        """Call the module's method ``name`` on every worker; arguments in ``NeedParallel`` are split among them.

        Args:
            gather: "list": one result a rank; "first": rank 0's; "mean": of numbers; "cat": tensors, lists or dicts of
                them joined, in the order of the rows where ``NeedParallel(balance_by=...)`` dealt them out.
        """
        group = self._built_group()
        check_gather(gather)
        if not callable(getattr(self._module_class, name, None)):
            raise InvalidInputError(f"{self._module_class.__name__} has no method {name!r}")
        self._require("weights", f"{name}()")
        self._num_changes += 1
        calls = split_arguments(args, kwargs, len(group.workers))
        found = gathered(name, group.call(f"module.{name}", calls), gather)
        return in_order_of_rows(found, args, kwargs, len(group.workers)) if gather == "cat" else found

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
        batch: Mapping[str, Tensor],
        loss_fn: Callable[..., Any],
        *,
        token_weights: Mode = "token-mean",
        max_length: int | None = None,
        max_tokens_per_micro_batch: int = _MAX_TOKENS,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
        with_entropy: bool = True,
    ) -> dict[str, float]:
        """One optimizer step on the whole batch, also where no token of it is trained on, which a warning names.

        The loss is ``sum_t token_weight[t] * loss_fn(...)[t]`` over the batch, however it is cut into micro-batches.

        Args:
            batch: see ``rlcore.engines.batch``; ``loss_mask`` marks the tokens that are trained on (all but each
                first token when absent). Every other entry reaches ``loss_fn`` as ``per_token[name]``.
            loss_fn: ``(logprob, entropy, per_token) -> (value, stats)``, such as ``rlcore.ops.ppo_clip()``.
            token_weights: a mode of ``rlcore.ops.token_weights``.
            max_length: tokens a response can have, which "seq-mean-token-sum-norm" (Dr. GRPO) divides by.
            max_grad_norm: gradients are scaled down to this norm; None leaves them.
            temperature: the sampler's.
            with_entropy: False passes None and saves its work.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``num_tokens``, ``lr/<optimizer>`` and the loss's statistics.

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
        packed = self._weighted(batch, token_weights, max_length)
        num_tokens = int((packed[WEIGHT] != 0).sum())
        if not num_tokens:
            _log.warning(
                "train_batch() got no token that is trained on: optimizers and schedulers take a step all the same; "
                "leave such a batch out"
            )
        self._num_changes += 1
        metrics: dict[str, float] = self._call_on_shares(TrainExecutor.train_step, packed, loss_fn, options)
        return metrics | {"num_tokens": num_tokens}

    @takes("eval_batch()", **_LOSS_KINDS)
    def eval_batch(
        self,
        batch: Mapping[str, Tensor],
        loss_fn: Callable[..., Any],
        *,
        token_weights: Mode = "token-mean",
        max_length: int | None = None,
        max_tokens_per_micro_batch: int = _MAX_TOKENS,
        temperature: float = 1.0,
        with_entropy: bool = True,
    ) -> dict[str, float]:
        """The loss and statistics that ``train_batch`` would return, in evaluation mode; nothing changes.

        Arguments are those of ``train_batch``. Optimizer and gradients may be away.

        Returns:
            ``loss``, ``num_tokens`` and the loss's statistics.
        """
        self._require("weights", "eval_batch()")
        options = LossOptions(
            max_tokens_per_micro_batch=max_tokens_per_micro_batch, temperature=temperature, with_entropy=with_entropy
        )
        packed = self._weighted(batch, token_weights, max_length)
        metrics: dict[str, float] = self._call_on_shares(TrainExecutor.evaluate, packed, loss_fn, options)
        return metrics | {"num_tokens": int((packed[WEIGHT] != 0).sum())}

    def _weighted(self, batch: Mapping[str, Tensor], mode: Mode, max_length: int | None) -> dict[str, Tensor]:
        """The batch packed and checked, with the share that each token has in the loss."""
        packed = to_packed(batch)
        if WEIGHT in packed:
            raise InvalidInputError(
                f"a batch cannot have an entry {WEIGHT!r}, which comes of token_weights={mode!r}; to weight tokens "
                "further, multiply in loss_fn by an entry of another name"
            )
        weight_T = make_token_weights(mode, _loss_mask(packed), cu_seqlens=packed["cu_seqlens"], max_length=max_length)
        self._check_batch(packed, weight_T != 0)
        return packed | {WEIGHT: weight_T}

    @takes("forward_logprobs()", **_BATCH_KINDS, top_p=NUMBER, top_k=WHOLE)
    def forward_logprobs(
        self,
        batch: Mapping[str, Tensor],
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        max_tokens_per_micro_batch: int = _MAX_TOKENS,
    ) -> Tensor:
        """Log-probability of each token given those before it, under the sampler's distribution.

        Returns:
            float32 on the host, shaped as ``input_ids``; 0 on first tokens, on padding, and outside ``loss_mask``
            when the batch has one.
        """
        self._require("weights", "forward_logprobs()")
        packed = to_packed({name: batch[name] for name in _LAYOUT if name in batch})
        options = ScoreOptions(
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
        scored_T = _loss_mask(packed)
        self._check_batch(packed, scored_T)
        logprob_T: Tensor = self._call_on_shares(TrainExecutor.score, packed | {SCORED: scored_T}, options)
        return logprob_T if "cu_seqlens" in batch else _padded(logprob_T, batch)

    def _check_batch(self, packed: Mapping[str, Tensor], counted_T: Tensor) -> None:
        # Here and not in the workers: one that refused its share would leave the others waiting for it.
        check_tokens(packed, self._module.output_head().weight.shape[0])
        check_finite(packed, counted_T)

    def _call_on_shares(self, method: Callable[..., R], packed: dict[str, Tensor], *args: Any) -> R:
        """Each worker gets its share of the batch; the result, which is the same on all."""
        group = self._built_group()
        parts = shares(packed, group.workers[0].context.world_size, args[-1].max_tokens_per_micro_batch)
        calls: list[tuple[Any, dict[str, Any]]] = [
            ((parts[worker.context.rank], *args), {}) for worker in group.workers
        ]
        result: R = group.call(method.__name__, calls)[0]
        return result

    # --------------------------------------------------------------------------------------------- weights

    def sync_weights(
        self,
        target: InferenceEngine | Sequence[InferenceEngine],
        *,
        version: int | None = None,
        route: Route | None = None,
        staged: bool = False,
        verify: bool = False,
        checksums: Checksums = "sample",
        staging_bytes: int | None = None,
        slab_bytes: int | None = None,
        timeout_s: float = 120.0,
    ) -> SyncReport:
        """Give ``target``, one engine or several, these weights; all serve them from then on, or none does.

        Args:
            version: number of the new weights, which completions say (``version_spans``); None is one more than the
                targets'. Numbers of your own, such as those of steps, may go back, and are not compared.
            route: "local", "direct", "packed" or "collective" (docs/weight_sync.md); None takes the first that works.
            staged: the targets keep their old weights whole until all of the new ones are there; takes their memory
                twice meanwhile.
            verify: compare every byte with what the target's own loader makes of the same weights; slow.
            checksums: of buckets, on "packed" and "collective": of none, one in 16, or all.
            staging_bytes: size of each of the two staging buffers of a trainer's worker; None chooses.
            slab_bytes: the former name of ``staging_bytes``, deprecated.
            timeout_s: for all of it.

        Raises:
            StateError: the weights of either side are not on the device.
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
                checksums=checksums,
                staging_bytes=staging_bytes,
                is_same=is_same,
                timeout_s=timeout_s,
            )

        return self._weight_sync.run(group, targets, self._num_changes, options)

    p2p_weight_sync = sync_weights

    @takes("state_dict()", adapters=_ADAPTERS)
    def state_dict(self, *, adapters: Adapters = "merged") -> dict[str, Tensor]:
        """Every weight by checkpoint name, copied to the host.

        Args:
            adapters: merged into the weights, or "base", the weights without, or "only" those of adapters.
        """
        self._require("weights", "state_dict()")
        state: dict[str, Tensor] = self._call(TrainExecutor.state_dict, adapters)[0]
        return state

    @takes("load_state_dict()", state=Kind("a mapping of tensors, as state_dict() gives,", MAPPING.has))
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite every weight, or every one of adapters: the names must be those of ``state_dict()``, or of
        ``state_dict(adapters="only")`` where the module has some."""
        self._require("weights", "load_state_dict()", may_be_empty=not self._has_adapters)
        self._num_changes += 1
        self._call(TrainExecutor.load_state_dict, state)
        self._residency.set("weights", State.LOADED)


_LAYOUT = ("input_ids", "attention_mask", "cu_seqlens", "loss_mask")


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


def _loss_mask(packed: Mapping[str, Tensor]) -> Tensor:
    """[T] bool: tokens that count; never a sequence's first, which nothing precedes."""
    given_T = packed.get("loss_mask", torch.ones_like(packed["input_ids"]))
    others = given_T[(given_T != 0) & (given_T != 1)]
    if len(others):
        raise InvalidInputError(
            f"loss_mask must be 0 or 1, or False or True, for each token, got {others[0].item()}; to weight tokens, "
            "multiply in loss_fn by an entry of another name"
        )
    mask_T = given_T.bool().clone()
    mask_T[packed["cu_seqlens"][:-1].long()] = False
    return mask_T


def _padded(value_T: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    mask_NL = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool().cpu()
    padded_NL: Tensor = torch.zeros(mask_NL.shape)
    padded_NL[mask_NL] = value_T
    return padded_NL
