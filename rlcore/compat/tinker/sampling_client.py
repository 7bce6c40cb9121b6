"""``SamplingClient``, with Tinker's methods: completions and log-probs of one snapshot of the weights."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from rlcore.arguments import LIST, Kind, kind_of, plain_number, takes
from rlcore.compat.tinker import types
from rlcore.compat.tinker.futures import APIFuture, begins, ends
from rlcore.compat.tinker.host import ModelHost, Snapshot
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.model_folder import check_model_folder, load_tokenizer
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import InvalidInputError, StateError, UnsupportedError

_PROMPT = Kind("a ModelInput with tokens", lambda value: isinstance(value, types.ModelInput) and value.length > 0)


class SamplingClient:
    """Samples from one snapshot of the weights, also after the trainer has gone on."""

    def __init__(self, host: ModelHost, base_model: str, snapshot: Snapshot | None) -> None:
        self._host, self._base_model, self._snapshot = host, base_model, snapshot

    @takes("sample()", prompt=_PROMPT, sampling_params=kind_of("SamplingParams", types.SamplingParams))
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

    @takes("compute_logprobs()", prompt=_PROMPT)
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

    sample_async, compute_logprobs_async = ends(sample), ends(compute_logprobs)
    get_base_model_async = begins(get_base_model)

    def _weights(self) -> Snapshot:
        return self._host.base if self._snapshot is None else self._snapshot

    def _params(self, given: types.SamplingParams, num_samples: int, length: int) -> SamplingParams:
        ids = [self._token_of(one) if isinstance(one, str) else plain_number(one) for one in _stops(given.stop)]
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


def _stops(given: Any) -> Sequence[Any]:
    stop = given.tolist() if hasattr(given, "tolist") else given
    if stop is None or isinstance(stop, str):
        return [] if stop is None else [stop]
    if not LIST.has(stop):
        raise InvalidInputError(
            f"SamplingParams.stop must be a text, or a list of texts or token ids, got {given!r:.100}"
        )
    return stop  # type: ignore[no-any-return]


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
