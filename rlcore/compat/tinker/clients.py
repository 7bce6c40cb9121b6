"""``ServiceClient``, ``TrainingClient`` and ``SamplingClient``, with Tinker's methods.

Letters: T packed tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from rlcore.arguments import SECONDS, takes
from rlcore.compat.tinker import types
from rlcore.compat.tinker.futures import APIFuture, ClientFuture
from rlcore.compat.tinker.host import ModelHost, Snapshot
from rlcore.compat.tinker.losses import READS, whole_config
from rlcore.compat.tinker.module import lora_module, plain
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.model_folder import check_model_folder, load_tokenizer
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import InvalidInputError, StateError, UnsupportedError

CustomLoss = Callable[[list[types.Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]
_MAX_TOKENS = 16384
"""Tokens of a micro-batch."""


class SamplingClient:
    """Samples from one snapshot of the weights, also after the trainer has gone on."""

    def __init__(self, host: ModelHost, base_model: str, snapshot: Snapshot | None) -> None:
        self._host, self._base_model, self._snapshot = host, base_model, snapshot

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[types.SampleResponse]:
        """Return completions of a prompt, with the log-probs of their tokens under the distribution sampled from."""
        if topk_prompt_logprobs:
            raise UnsupportedError("topk_prompt_logprobs", "engines give the log-probs of the tokens alone")
        tokens = prompt.to_ints()
        params = self._params(sampling_params, num_samples, len(tokens))
        prompt_logprobs = self.compute_logprobs(prompt) if include_prompt_logprobs else None
        answer: Future[RequestOutput] = Future()
        response: Future[types.SampleResponse] = Future()

        def finish(done: Future[RequestOutput]) -> None:
            try:
                given = prompt_logprobs.result() if prompt_logprobs else None
                response.set_result(_response(done.result(), given))
            except BaseException as error:
                response.set_exception(error)

        answer.add_done_callback(finish)

        def note_failure(begun: Future[None]) -> None:
            if begun.cancelled():
                answer.set_exception(StateError("the ServiceClient was closed before this sample began"))
            elif (error := begun.exception()) and not answer.done():
                answer.set_exception(error)

        begun = self._host.submit(lambda: self._host.sample(self._weights(), tokens, params, answer))
        begun.future().add_done_callback(note_failure)
        return APIFuture(response)

    def compute_logprobs(self, prompt: types.ModelInput) -> APIFuture[list[float | None]]:
        """Return the log-prob of each token given those before it; None for the first."""

        def compute() -> list[float | None]:
            tokens = torch.tensor([prompt.to_ints()])
            with self._host.trainer_at(self._weights()):
                logprobs = self._host.train.forward_logprobs(
                    {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
                )
            return [None, *logprobs[0, 1:].tolist()]

        return self._host.submit(compute)

    def get_tokenizer(self) -> Any:
        return load_tokenizer(check_model_folder(Path(self._base_model)))

    def get_base_model(self) -> str:
        return self._base_model

    def _weights(self) -> Snapshot:
        return self._host.base if self._snapshot is None else self._snapshot

    def _params(self, given: types.SamplingParams, num_samples: int, length: int) -> SamplingParams:
        stops: list[Any] = [given.stop] if isinstance(given.stop, str) else list(given.stop or ())
        ids = [self._token_of(one) if isinstance(one, str) else int(one) for one in stops]
        max_tokens = given.max_tokens
        if max_tokens is None:
            longest = check_model_folder(Path(self._base_model)).config.get("max_position_embeddings")
            if not isinstance(longest, int):
                raise InvalidInputError(
                    "SamplingParams.max_tokens must be given: the model's config.json has no length"
                )
            max_tokens = max(1, longest - length)
        return SamplingParams(
            n=num_samples,
            max_tokens=max_tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            seed=given.seed,
            stop_token_ids=tuple(ids),
            ignore_eos=given.stop is not None,
        )

    def _token_of(self, text: str) -> int:
        ids = self.get_tokenizer()(text, add_special_tokens=False).input_ids
        if len(ids) != 1:
            raise UnsupportedError(f"stop={text!r}", f"it must be one token, and is {len(ids)}; give token ids")
        return int(ids[0])


class TrainingClient:
    """Trains the adapters of one base model. Calls are done in the order in which they are made."""

    def __init__(self, host: ModelHost, base_model: str, rank: int, folder: Path) -> None:
        self._host, self._base_model, self._rank, self._folder = host, base_model, rank, folder
        self._names: dict[str, Snapshot] = {}

    def forward(
        self, data: list[types.Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As ``forward_backward``, without gradients."""
        return self._begin(data, loss_fn, loss_fn_config, with_gradients=False)

    def forward_backward(
        self, data: list[types.Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Add the gradients of a loss, summed over the tokens of ``data``, to those since the last ``optim_step``.

        Args:
            loss_fn: "cross_entropy", "importance_sampling", "ppo", "cispo" or "dro".
            loss_fn_config: such as {"clip_low_threshold": 0.9}.
        """
        return self._begin(data, loss_fn, loss_fn_config, with_gradients=True)

    def forward_backward_custom(
        self, data: list[types.Datum], loss_fn: CustomLoss
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """As ``forward_backward``, with a loss of your own, which costs a second forward.

        Args:
            loss_fn: ``loss_fn(data, logprobs) -> (loss, metrics)``; it runs in this process, on a list of tensors
                [T] with the log-probs of the targets.
        """
        _check(data, ())

        def compute() -> types.ForwardBackwardOutput:
            unweighted = [_with(datum, weights=torch.zeros(datum.model_input.length)) for datum in data]
            found = self._accumulate(unweighted, "cross_entropy", {}, with_gradients=False)
            logprobs = [one["logprobs"].to_torch().requires_grad_() for one in found.loss_fn_outputs]
            loss, metrics = loss_fn(data, logprobs)
            slopes = torch.autograd.grad(loss, logprobs, allow_unused=True)
            weighted = [
                _with(datum, weights=torch.zeros_like(own) if slope is None else -slope)
                for datum, own, slope in zip(data, logprobs, slopes, strict=True)
            ]
            self._accumulate(weighted, "cross_entropy", {}, with_gradients=True)
            return types.ForwardBackwardOutput(found.loss_fn_output_type, found.loss_fn_outputs, dict(metrics))

        return self._host.submit(compute)

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

    def save_state(self, name: str) -> APIFuture[types.SaveWeightsResponse]:
        """Write a checkpoint of weights and optimizer."""

        def save() -> types.SaveWeightsResponse:
            self._host.train.save(self._folder / name)
            return types.SaveWeightsResponse(str(self._folder / name))

        return self._host.submit(save)

    def load_state(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        """Read a checkpoint of ``save_state``; its optimizer, too."""

        def load() -> types.LoadWeightsResponse:
            self._host.note_change()
            self._host.train.load(path)
            return types.LoadWeightsResponse(path)

        return self._host.submit(load)

    load_state_with_optimizer = load_state

    def get_tokenizer(self) -> Any:
        return load_tokenizer(check_model_folder(Path(self._base_model)))

    def get_info(self) -> types.GetInfoResponse:
        return types.GetInfoResponse(types.ModelData(self._base_model), True, self._rank, self._base_model)

    # ------------------------------------------------------------------------------------ forward and backward

    def _begin(
        self, data: list[types.Datum], loss: str, config: Mapping[str, float] | None, *, with_gradients: bool
    ) -> APIFuture[types.ForwardBackwardOutput]:
        whole = whole_config(loss, config or {})
        _check(data, READS[loss])
        return self._host.submit(lambda: self._accumulate(data, loss, whole, with_gradients=with_gradients))

    def _accumulate(
        self, data: list[types.Datum], loss: str, config: Mapping[str, float], *, with_gradients: bool
    ) -> types.ForwardBackwardOutput:
        outputs, total = [], 0.0
        for part in _micro_batches(data):
            packed = _packed(part, READS[loss])
            ((logprob_T, loss_T),) = self._host.train.accumulate(packed, loss, dict(config), with_gradients)
            lengths = [datum.model_input.length for datum in part]
            for logprob, elementwise in zip(logprob_T.split(lengths), loss_T.split(lengths), strict=True):
                total += float(elementwise.sum())
                both = {"logprobs": logprob, "elementwise_loss": elementwise}
                outputs.append({name: types.TensorData.from_torch(value) for name, value in both.items()})
        return types.ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": total})


class ServiceClient:
    """Makes clients. Models are folders of this machine, and engines are built here: there is no service.

    Args:
        folder: where ``save_state`` writes.
        trainer: arguments of ``rlcore.TrainEngine.build``, such as {"devices": "cuda:0"}.
        sampler: those of ``rlcore.InferenceEngine.build``, and ``executor``. Without ``devices`` it shares the
            trainer's.
        unhealthy_after_s: a sampler in a process of its own that does not answer for so long, as a stopped one does, is
            restarted, and what it had under way begins anew.
    """

    @takes("ServiceClient", unhealthy_after_s=SECONDS)
    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        folder: str | Path = "tinker-states",
        trainer: Mapping[str, Any] | None = None,
        sampler: Mapping[str, Any] | None = None,
        unhealthy_after_s: float = 60.0,
    ) -> None:
        self._unhealthy_after_s = unhealthy_after_s
        self._folder, self._trainer, self._sampler = Path(folder), dict(trainer or {}), dict(sampler or {})
        if self._trainer.get("data_parallel_size", 1) != 1:
            raise UnsupportedError("trainer data_parallel_size above 1", "gradients add up in one worker")
        self._hosts: dict[str, ModelHost] = {}
        self._clients: dict[str, TrainingClient] = {}

    def create_lora_training_client(  # noqa: PLR0917  # Tinker's own
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
    ) -> ClientFuture[TrainingClient]:
        """Return a client that trains new adapters of a model folder; one for each base model.

        ``train_unembed`` does nothing: the output head gets no adapter.
        """
        if base_model in self._hosts:
            raise StateError(
                f"{base_model} has a client already; rlcore trains one set of adapters of a model at a time"
            )
        host = self._host(base_model, rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn)
        client = TrainingClient(host, base_model, rank, self._folder)
        self._clients[base_model] = client
        return _done(client)

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> ClientFuture[SamplingClient]:
        """Return a client that samples from a base model, or from weights of ``save_weights_for_sampler``."""
        if (model_path is None) == (base_model is None):
            raise InvalidInputError("create_sampling_client() takes one of model_path and base_model")
        if base_model is not None:
            host = self._hosts.get(base_model) or self._host(
                base_model, rank=1, seed=None, train_mlp=False, train_attn=True
            )
            return _done(SamplingClient(host, base_model, None))
        owner = next((one for one in self._clients.values() if str(model_path).startswith(one._base_model)), None)
        if owner is None:
            raise InvalidInputError(f"no weights were saved as {model_path!r} by a client of this ServiceClient")
        return _done(owner.create_sampling_client(str(model_path)))

    def close(self) -> None:
        """Close the engines of all clients."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _host(self, base_model: str, **options: Any) -> ModelHost:
        path = check_model_folder(Path(base_model)).path
        self._hosts[base_model] = ModelHost(
            path,
            lora_module(path, **options),
            self._trainer,
            self._sampler,
            unhealthy_after_s=self._unhealthy_after_s,
        )
        return self._hosts[base_model]


def _done(client: Any) -> ClientFuture[Any]:
    future: Future[Any] = Future()
    future.set_result(client)
    return ClientFuture(future)


def _check(data: Sequence[types.Datum], reads: Sequence[str]) -> None:
    if not data:
        raise InvalidInputError("forward_backward() needs at least one datum, got none")
    for number, datum in enumerate(data):
        for name in ("target_tokens", *reads):
            found = datum.loss_fn_inputs.get(name)
            if found is None:
                raise InvalidInputError(f"datum {number} has no loss_fn_inputs[{name!r}], which the loss reads")
            if len(found.data) != datum.model_input.length:
                raise InvalidInputError(
                    f"datum {number} has {len(found.data)} {name} for {datum.model_input.length} tokens of model_input"
                )


def _micro_batches(data: Sequence[types.Datum]) -> list[list[types.Datum]]:
    parts: list[list[types.Datum]] = []
    room = 0
    for datum in data:
        if datum.model_input.length > room or not parts:
            parts.append([])
            room = _MAX_TOKENS
        parts[-1].append(datum)
        room -= datum.model_input.length
    return parts


def _packed(data: Sequence[types.Datum], reads: Sequence[str]) -> dict[str, Tensor]:
    lengths = torch.tensor([0, *(datum.model_input.length for datum in data)])
    joined = {
        name: torch.cat([datum.loss_fn_inputs[name].to_torch().flatten() for datum in data])
        for name in ("target_tokens", *reads)
    }
    tokens = [token for datum in data for token in datum.model_input.to_ints()]
    return joined | {"input_ids": torch.tensor(tokens), "cu_seqlens": lengths.cumsum(0).to(torch.int32)}


def _with(datum: types.Datum, **inputs: Tensor) -> types.Datum:
    return types.Datum(datum.model_input, {**datum.loss_fn_inputs, **inputs})


def _response(output: RequestOutput, prompt_logprobs: list[float | None] | None) -> types.SampleResponse:
    sequences = [
        types.SampledSequence(
            "length" if one.finish_reason == "length" else "stop",
            uuid.uuid4().hex,
            list(one.token_ids),
            list(one.logprobs),
        )
        for one in output.outputs
    ]
    return types.SampleResponse(sequences, prompt_logprobs)
