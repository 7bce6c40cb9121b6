"""``TrainingClient``, with Tinker's methods: gradients, steps, and the weights that they lead to.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.arguments import MAPPING, PATH, TEXT, Kind, kind_of, optional, takes
from rlcore.compat.tinker import types
from rlcore.compat.tinker.data import check_data, micro_batches, packed, refuse_unread, with_inputs
from rlcore.compat.tinker.futures import APIFuture, ClientFuture, begins, ends
from rlcore.compat.tinker.host import ModelHost, Snapshot
from rlcore.compat.tinker.losses import READS, whole_config
from rlcore.compat.tinker.module import plain
from rlcore.compat.tinker.sampling_client import SamplingClient
from rlcore.engines.sampling.model_folder import check_model_folder, load_tokenizer
from rlcore.errors import InvalidInputError

_NAME = Kind(
    'a name (not "", "." or "..", and without "/" or NUL)',
    lambda value: isinstance(value, str) and value not in {"", ".", ".."} and not {"/", "\0"} & set(value),
)
CustomLoss = Callable[[list[types.Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]


class TrainingClient:
    """Trains the adapters of one base model. Calls are done in the order in which they are made."""

    def __init__(self, host: ModelHost, base_model: str, rank: int, folder: Path) -> None:
        self._host, self._base_model, self._rank, self._folder = host, base_model, rank, folder
        self._names: dict[str, Snapshot] = {}

    @takes("forward()", loss_fn=TEXT, loss_fn_config=optional(MAPPING))
    def forward(
        self, data: list[types.Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As ``forward_backward``, without gradients."""
        return self._begin(data, loss_fn, loss_fn_config, with_gradients=False)

    @takes("forward_backward()", loss_fn=TEXT, loss_fn_config=optional(MAPPING))
    def forward_backward(
        self, data: list[types.Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Add the gradients of a loss, summed over the tokens of ``data``, to those since the last ``optim_step``.

        Args:
            loss_fn: "cross_entropy", "importance_sampling", "ppo", "cispo" or "dro".
            loss_fn_config: such as {"clip_low_threshold": 0.9}.
        """
        return self._begin(data, loss_fn, loss_fn_config, with_gradients=True)

    @takes("forward_backward_custom()", loss_fn=Kind("a function", callable))
    def forward_backward_custom(
        self, data: list[types.Datum], loss_fn: CustomLoss
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As ``forward_backward``, with a loss of your own, which costs a second forward.

        Args:
            loss_fn: ``loss_fn(data, logprobs) -> (loss, metrics)``; it runs in this process, on a list of tensors
                [T] with the log-probs of the targets.
        """
        check_data(data, (), caller="forward_backward_custom()", vocab_size=self._host.vocab_size)

        def compute() -> types.ForwardBackwardOutput:
            unweighted = [with_inputs(datum, weights=torch.zeros(datum.model_input.length)) for datum in data]
            found = self._accumulate(unweighted, "cross_entropy", {}, with_gradients=False)
            logprobs = [one["logprobs"].to_torch().requires_grad_() for one in found.loss_fn_outputs]
            loss, metrics = _checked_loss(loss_fn(data, logprobs))
            slopes = _checked_slopes(torch.autograd.grad(loss, logprobs, allow_unused=True, materialize_grads=True))
            weighted = [with_inputs(datum, weights=-slope) for datum, slope in zip(data, slopes, strict=True)]
            self._accumulate(weighted, "cross_entropy", {}, with_gradients=True)
            return types.ForwardBackwardOutput(found.loss_fn_output_type, found.loss_fn_outputs, dict(metrics))

        return self._host.submit(compute)

    @takes("optim_step()", optim_params=kind_of("AdamParams", types.AdamParams))
    def optim_step(self, optim_params: types.AdamParams) -> APIFuture[types.OptimStepResponse]:
        """Take a step of AdamW with the gradients since the last one."""

        def step() -> types.OptimStepResponse:
            self._host.note_change()
            (norm,) = self._host.train.step_adam(plain(optim_params))
            return types.OptimStepResponse({"grad_norm": norm})

        return self._host.submit(step)

    # ---------------------------------------------------------------------------------------------- weights

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> ClientFuture[SamplingClient]:
        """Return a client that samples from the weights of now."""

        def make() -> SamplingClient:
            return SamplingClient(self._host, self._base_model, self._host.snapshot())

        return ClientFuture(self._host.submit(make).future())

    @takes("save_weights_for_sampler()", name=_NAME)
    def save_weights_for_sampler(self, name: str) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Keep the weights of now, in this process, for ``create_sampling_client(path)``."""

        def keep() -> types.SaveWeightsForSamplerResponse:
            path = f"{self._base_model}/sampler/{name}"
            self._names[path] = self._host.snapshot()
            return types.SaveWeightsForSamplerResponse(path)

        return self._host.submit(keep)

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        """Return a client that samples from weights of ``save_weights_for_sampler``."""
        if model_path not in self._names:
            raise InvalidInputError(
                f"no weights were saved as {model_path!r}; saved: {', '.join(self._names) or 'none'}"
            )
        return SamplingClient(self._host, self._base_model, self._names[model_path])

    @takes("save_state()", name=_NAME)
    def save_state(self, name: str) -> APIFuture[types.SaveWeightsResponse]:
        """Write a checkpoint of weights and optimizer."""

        def save() -> types.SaveWeightsResponse:
            self._host.train.save(self._folder / name)
            return types.SaveWeightsResponse(str(self._folder / name))

        return self._host.submit(save)

    @takes("load_state()", path=PATH)
    def load_state(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        """Read the weights of a checkpoint of ``save_state``; the optimizer begins anew."""
        return self._load(path, with_optimizer=False)

    @takes("load_state_with_optimizer()", path=PATH)
    def load_state_with_optimizer(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        """Read the weights and the optimizer of a checkpoint of ``save_state``."""
        return self._load(path, with_optimizer=True)

    def _load(self, path: str, *, with_optimizer: bool) -> APIFuture[types.LoadWeightsResponse]:
        def load() -> types.LoadWeightsResponse:
            self._host.note_change()
            self._host.train.load(path)
            if not with_optimizer:
                self._host.train.reset_optimizer()
            return types.LoadWeightsResponse(str(path))

        return self._host.submit(load)

    def get_tokenizer(self) -> Any:
        return load_tokenizer(check_model_folder(Path(self._base_model)))

    def get_info(self) -> types.GetInfoResponse:
        return types.GetInfoResponse(types.ModelData(self._base_model), True, self._rank, self._base_model)

    forward_async, forward_backward_async = begins(forward), begins(forward_backward)
    forward_backward_custom_async, optim_step_async = begins(forward_backward_custom), begins(optim_step)
    save_state_async, save_weights_for_sampler_async = begins(save_state), begins(save_weights_for_sampler)
    load_state_async, load_state_with_optimizer_async = begins(load_state), begins(load_state_with_optimizer)
    create_sampling_client_async, get_info_async = begins(create_sampling_client), begins(get_info)
    save_weights_and_get_sampling_client_async = ends(save_weights_and_get_sampling_client)

    # ------------------------------------------------------------------------------------ forward and backward

    def _begin(
        self, data: list[types.Datum], loss: str, config: Mapping[str, float] | None, *, with_gradients: bool
    ) -> APIFuture[types.ForwardBackwardOutput]:
        whole = whole_config(loss, config or {})
        caller = "forward_backward()" if with_gradients else "forward()"
        check_data(data, READS[loss], caller=caller, vocab_size=self._host.vocab_size)
        refuse_unread(data, READS[loss], caller=caller)
        return self._host.submit(lambda: self._accumulate(data, loss, whole, with_gradients=with_gradients))

    def _accumulate(
        self, data: list[types.Datum], loss: str, config: Mapping[str, float], *, with_gradients: bool
    ) -> types.ForwardBackwardOutput:
        outputs, total = [], 0.0
        for part in micro_batches(data):
            batch = packed(part, READS[loss])
            ((logprob_T, loss_T),) = self._host.train.accumulate(batch, loss, dict(config), with_gradients)
            lengths = [datum.model_input.length for datum in part]
            for logprob, elementwise in zip(logprob_T.split(lengths), loss_T.split(lengths), strict=True):
                total += float(elementwise.sum())
                both = {"logprobs": logprob, "elementwise_loss": elementwise}
                outputs.append({name: types.TensorData.from_torch(value) for name, value in both.items()})
        return types.ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": total})


def _checked_loss(result: Any) -> tuple[Tensor, Mapping[str, float]]:
    """Return what a loss of the user's gave, if it can be derived and its metrics are a mapping."""
    match result:
        case (Tensor(requires_grad=True) as loss, Mapping() as metrics) if loss.numel() == 1:
            return loss, metrics
    raise InvalidInputError(
        "the loss function of forward_backward_custom() must return (loss, metrics), a tensor of one number that "
        f"depends on the log-probs and a mapping; got {result!r:.200}"
    )


def _checked_slopes(slopes: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the derivatives of a loss of the user's in the log-probs of each datum, if they are finite."""
    for number, slope in enumerate(slopes):
        if not slope.isfinite().all():
            raise InvalidInputError(
                "the loss function of forward_backward_custom() must have finite derivatives; that in the log-probs of "
                f"datum {number} is {slope.tolist()!r:.200}; no gradient was added"
            )
    return slopes
