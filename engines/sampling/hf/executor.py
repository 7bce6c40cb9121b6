"""The inference executor ``hf``: each worker runs a transformers model on one device."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.activations import recording
from rlcore.arguments import COUNT
from rlcore.engines.executors.base import InferenceExecutor
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.offload.group import OffloadGroup
from rlcore.engines.offload.guards import Guard
from rlcore.engines.offload.storages import owned
from rlcore.engines.sampling.completion import Completion, RequestOutput
from rlcore.engines.sampling.hf.decoding import BatchDecoder, Decoded
from rlcore.engines.sampling.hf.decoding_queue import DecodingQueue
from rlcore.engines.sampling.hf.schedule import SampleRequest, batches, expand
from rlcore.engines.sampling.model_folder import ModelFolder, check_model_folder
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt, PromptReader
from rlcore.engines.sampling.request_queue import PauseMode
from rlcore.engines.sampling.seeds import seeds_of_each
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.target import ModuleTarget
from rlcore.errors import (
    CheckpointError,
    InvalidInputError,
    MissingDependencyError,
    StateError,
    SyncError,
    UnsupportedError,
    one_line,
)
from rlcore.image_inputs import ImageInputs
from rlcore.routing.record import RouteRecorder
from rlcore.weights.catalog import named_tensors
from rlcore.weights.names import mismatch

# Fractions of the free device memory. A step copies one layer's cache while it grows, and the allocator keeps blocks of
# earlier sizes; sampling needs about six [B, V] float32 tensors, sorted values included.
_CACHE_FRACTION, _LOGITS_FRACTION = 0.5, 0.25
_LOGITS_BYTES = 6 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HfOptions:
    """The build options of the executor ``hf``."""

    dtype: str | torch.dtype = "auto"
    """Dtype of the weights, such as "bfloat16"; "auto" is that of config.json."""
    attn_implementation: str | None = None
    """transformers' name of an attention; None lets it choose."""
    max_num_seqs: int | None = None
    """Most completions that are decoded together; None fits a quarter of the free device memory."""
    max_num_tokens: int | None = None
    """Most tokens that are cached at a time; None fits half of the free device memory."""
    enable_return_routed_experts: bool = False
    """Completions have the experts of each token; vLLM's name."""

    def __post_init__(self) -> None:
        _dtype(self.dtype)
        for name in ("max_num_seqs", "max_num_tokens"):
            value = getattr(self, name)
            if value is not None and not COUNT.has(value):
                raise InvalidInputError(f"{name} must be {COUNT.words} or None, got {value!r}")
        if not isinstance(self.enable_return_routed_experts, bool):
            given = self.enable_return_routed_experts
            raise InvalidInputError(f"enable_return_routed_experts must be True or False, got {given!r}")


class HfExecutor(InferenceExecutor):
    """Generates with a Hugging Face causal language model on one device.

    The engine calls ``generate`` only when the weights are on the device. Submitted requests are decoded while
    ``collect`` runs, and stay where they are between two calls.
    """

    options_class = HfOptions

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._module: Any | None = None
        self._incoming: Any | None = None

    @property
    def module(self) -> Any:
        """The transformers model: eval mode, no parameter needs a gradient."""
        if self._module is None:
            raise StateError("the hf executor has no model yet; call build(path)")
        return self._module

    @classmethod
    def check(cls, path: Path, options: Mapping[str, Any], python: str | os.PathLike[str] | None) -> None:
        check_model_folder(path)

    def build(self, path: str | Path, /, **options: Any) -> None:
        """Load model and tokenizer; ``options`` are those of ``HfOptions``."""
        chosen = HfOptions(**options)
        folder = check_model_folder(path)
        module = _load_module(folder, dtype=_dtype(chosen.dtype), attn_implementation=chosen.attn_implementation)
        self._module = module.to(self.device.torch_device)
        for parameter in module.parameters():
            parameter.data = owned(parameter.data)
        text_config = module.config.get_text_config()
        self._vocab_size = folder.vocab_size
        self._max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self._reader = PromptReader(folder, self._max_positions, images=ImageInputs.of(module))
        self._max_num_seqs, self._max_num_tokens = chosen.max_num_seqs, chosen.max_num_tokens
        self._recorder = RouteRecorder(module) if chosen.enable_return_routed_experts else None
        self._cached_token_bytes = self._measure_cached_token()
        self._queue = DecodingQueue(
            read=self._reader.read,
            decoder=partial(self._decoder, self._module),
            limits=self._batch_limits,
            completion=self._completion,
        )
        self._receiver = Receiver(ModuleTarget(self._module, self.device))
        self.sync_ends = [self._receiver]
        self.offload_groups = {
            "weights": OffloadGroup(self.device, self._module.parameters, self._guard_weights),
            # Caches are made when they are needed. Requests whose cache is dropped begin anew.
            "kv_cache": OffloadGroup(self.device, tuple, before_leaving=self._queue.drop_caches),
        }

    def _guard_weights(self, guard: Guard, state: str) -> None:
        guard.guard_module(self.module, f"the weights of the hf executor are {state}; call onload('weights')")

    def read_weights(self, path: str | Path) -> None:
        dtype = next(self.module.parameters()).dtype
        loaded = _load_module(check_model_folder(path), dtype=dtype, attn_implementation=None)
        if found := mismatch(dict(named_tensors(self.module)), dict(named_tensors(loaded))):
            raise SyncError(f"{path} holds another model than the inference engine, which keeps its weights: {found}")
        self._incoming = loaded

    def take_weights(self, *, version: int) -> None:
        loaded, self._incoming = self._incoming, None
        if loaded is None:
            raise StateError("take_weights() has nothing to take; call read_weights(path) first")
        given = dict(named_tensors(loaded))
        for name, tensor in named_tensors(self.module):
            tensor.copy_(given[name])
        self._receiver.reloaded()

    def check_prompts(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, numbers: Sequence[int]
    ) -> list[Sequence[int]]:
        return [list(token_ids) for token_ids in self._reader.read(prompts, params, numbers)]

    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, version: int
    ) -> list[RequestOutput]:
        module = self.module
        token_ids = self._reader.read(prompts, params)
        samples = expand(token_ids, params, seeds_of_each(params))
        decoded: dict[tuple[int, int], Decoded] = {}
        max_num_seqs, max_num_tokens = self._batch_limits()
        with torch.inference_mode():
            for batch in batches(samples, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens):
                done = self._decoder(module, batch).run(self.emit, version)
                decoded |= {(s.request, s.index): result for s, result in zip(batch, done, strict=True)}
        outputs = self._outputs(samples, decoded)
        return [
            replace(output, prompt=prompt if isinstance(prompt, str) else None)
            for output, prompt in zip(outputs, prompts, strict=True)
        ]

    def activations(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        tokens = torch.tensor([list(token_ids)], device=self.device.torch_device)
        with torch.inference_mode(), recording(self.module) as found:
            self.module(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return found

    def submit(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, version: int
    ) -> None:
        self._queue.submit(numbers, prompts, params)

    def collect(self, timeout_s: float, *, version: int) -> dict[int, RequestOutput]:
        with torch.inference_mode():
            return self._queue.collect(timeout_s, version)

    def abort(self, numbers: Sequence[int] | None) -> int:
        with torch.inference_mode():
            return self._queue.abort(numbers)

    def pause(self, mode: PauseMode, *, version: int) -> None:
        with torch.inference_mode():
            self._queue.pause(mode, version)

    def resume(self) -> None:
        self._queue.resume()

    def _decoder(self, module: Any, batch: Sequence[SampleRequest]) -> BatchDecoder:
        return BatchDecoder(
            module,
            batch,
            eos_token_ids=self._reader.stop_token_ids,
            max_positions=self._max_positions,
            images=self._reader.images,
            recorder=self._recorder,
        )

    def _outputs(self, samples: list[SampleRequest], decoded: Mapping[tuple[int, int], Decoded]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for sample in samples:
            if sample.index == 0:
                outputs.append(RequestOutput(None, list(sample.prompt), []))
            outputs[-1].outputs.append(self._completion(decoded[sample.request, sample.index]))
        return outputs

    def _completion(self, decoded: Decoded) -> Completion:
        return self._reader.completion(
            decoded.token_ids,
            decoded.logprobs,
            is_stopped=decoded.is_stopped,
            spans=decoded.spans,
            routed_experts=decoded.routed_experts,
        )

    def _batch_limits(self) -> tuple[int, int]:
        """Return max_num_seqs and max_num_tokens, from the memory that is free now unless they were given."""
        memory = self.device.memory
        stats = memory.stats()
        # The allocator can also use memory that it has reserved and not allocated.
        available = memory.info().free_bytes + max(0, stats.reserved_bytes - stats.allocated_bytes)
        seqs = int(available * _LOGITS_FRACTION) // (self._vocab_size * _LOGITS_BYTES)
        tokens = int(available * _CACHE_FRACTION) // self._cached_token_bytes
        return self._max_num_seqs or max(1, seqs), self._max_num_tokens or max(1, tokens)

    def _measure_cached_token(self) -> int:
        """Return the bytes of one token in the cache, measured, as they depend on the architecture."""
        with torch.inference_mode():
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device.torch_device)
            layers = self.module(input_ids=token, use_cache=True).past_key_values.layers
        tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        num_bytes: int = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        return max(1, num_bytes)


def _load_module(folder: ModelFolder, *, dtype: str | torch.dtype, attn_implementation: str | None) -> Any:
    try:
        from transformers import (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
        )
    except ImportError as error:
        raise MissingDependencyError("transformers", needed_for="the hf executor", extra="hf") from error
    try:
        with _without_bars():
            config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
            reads_images = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
            kind = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
            module, info = kind.from_pretrained(
                folder.path,
                dtype=dtype,
                attn_implementation=attn_implementation,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # many types; the original is the cause
        raise CheckpointError(
            f"transformers cannot load {folder.path} as a causal language model: {one_line(error)}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"the weights in {folder.path} lack {len(missing)} tensors of {type(module).__name__}, such as "
            f"{missing[0]!r}, which would be left random; save the checkpoint again, whole"
        )
    _check_can_decode(module)
    return module.eval().requires_grad_(False)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Inside, transformers shows no progress bars: they would disturb the program's own display."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _check_can_decode(module: Any) -> None:
    accepted = inspect.signature(module.forward).parameters
    needed = ("position_ids", "attention_mask", "past_key_values", "logits_to_keep")
    if lacking := [name for name in needed if name not in accepted]:
        raise UnsupportedError(
            f"{type(module).__name__} in the hf executor",
            f"its forward takes no {', '.join(lacking)}; use vllm",
        )


def _dtype(value: str | torch.dtype) -> str | torch.dtype:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if value == "auto":
        return "auto"
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidInputError(f'dtype must be "auto" or a floating-point dtype such as "bfloat16", got {value!r}')
    return found
