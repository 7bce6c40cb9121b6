"""``RolloutWorkflow``: AReaLite's class of workflows, its requests and responses, and ``RLVRWorkflow``."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlcore.arguments import Kind, kind_of, takes
from rlcore.compat.areal.batches import padded
from rlcore.compat.areal.configuration import GenerationHyperparameters
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.rollout import RolloutClient, Trajectory
from rlcore.rollout.workflow import together


@dataclass
class ModelRequest:
    """One prompt."""

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: str(uuid.uuid4()))


LLMRequest = ModelRequest


@dataclass
class ModelResponse:
    """One completion, token by token."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: str

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


LLMResponse = ModelResponse


class EpisodeEngine:
    """The engine that ``arun_episode`` is given."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client

    @takes("agenerate()", request=kind_of("a ModelRequest", ModelRequest))
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion."""
        if request.gconfig.n_samples != 1:
            raise InvalidInputError(f"agenerate() takes gconfig.n_samples=1, got {request.gconfig.n_samples}")
        output = await self._client.generate(request.input_ids, request.gconfig.sampling_params)
        (one,) = output.outputs
        versions = [span.version for span in one.version_spans for _ in range(span.start, span.end)]
        return ModelResponse(list(output.prompt_token_ids), one.token_ids, one.logprobs, versions, one.finish_reason)


class RolloutWorkflow(ABC):
    """AReaLite's class of workflows."""

    @abstractmethod
    async def arun_episode(self, engine: EpisodeEngine, data: Any) -> Mapping[str, Tensor] | None:
        """Return padded tensors of the episode's sequences, or None to reject it."""


class RLVRWorkflow(RolloutWorkflow):
    """One prompt, ``gconfig.n_samples`` completions, a verifiable reward for each.

    ``reward_fn(prompt, completions, prompt_ids, completion_ids, **data) -> float``.
    """

    @takes(
        "RLVRWorkflow",
        reward_fn=Kind("a function", callable),
        gconfig=kind_of("GenerationHyperparameters", GenerationHyperparameters),
    )
    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        dump_dir: str | None = None,
    ) -> None:
        if dump_dir is not None:
            raise UnsupportedError("RLVRWorkflow(dump_dir=...)", "write what you want to see in reward_fn")
        self.reward_fn, self.gconfig, self.tokenizer = reward_fn, gconfig, tokenizer
        self.enable_thinking = enable_thinking

    async def arun_episode(self, engine: EpisodeEngine, data: Any) -> dict[str, Tensor]:
        prompt = self.tokenizer.apply_chat_template(
            data["messages"], tokenize=False, add_generation_prompt=True, enable_thinking=self.enable_thinking
        )
        input_ids = self.tokenizer(prompt, add_special_tokens=False).input_ids
        request = ModelRequest(input_ids, self.gconfig.new(n_samples=1))
        answers = await together(engine.agenerate(request) for _ in range(self.gconfig.n_samples))
        rewards = [
            self.reward_fn(
                prompt=prompt,
                completions=self.tokenizer.decode(one.output_tokens, skip_special_tokens=True),
                prompt_ids=one.input_tokens,
                completion_ids=one.output_tokens,
                **data,
            )
            for one in answers
        ]
        return padded([_trajectory(one, float(reward)) for one, reward in zip(answers, rewards, strict=True)])


def _trajectory(answer: ModelResponse, reward: float) -> Trajectory:
    given, made = answer.input_len, answer.output_len
    return Trajectory(
        answer.input_tokens + answer.output_tokens,
        [False] * given + [True] * made,
        [0.0] * given + answer.output_logprobs,
        [-1] * given + answer.output_versions,
        reward,
    )
