"""``RolloutClient``: what a workflow asks for completions, in rlcore's own words or in those of OpenAI's client.

Each episode has a client of its own, which keeps all that the episode sampled, token by token.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rlcore.arguments import ITERABLE, MAPPING, did_you_mean, optional, takes
from rlcore.engines.sampling.completion import Completion, RequestOutput
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import ParamsLike, Prompt, PromptLike, prompts_of
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.rollout.conversation import ConversationReader, Message
from rlcore.rollout.trajectory import Trajectory, joined_turns

Send = Callable[[Prompt, SamplingParams], Awaitable[RequestOutput]]
_numbers = itertools.count()
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_IGNORED = ("model", "user", "metadata", "store")
"""Arguments of OpenAI's client that say nothing about what is sampled."""
_DEFAULTS = {"stream": False, "stop": None, "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False}
"""Arguments that are accepted with this value, or None, alone."""
_NAMED = ("messages", "tools", "max_tokens", "max_completion_tokens", "extra_body")
"""Arguments of ``create`` that are no options, for its messages."""
_SAMPLING = ("temperature", "top_p", "n", "seed")


@dataclass(frozen=True)
class FunctionCall:
    """The function that a tool call names."""

    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool that the model asked for."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


@dataclass(frozen=True)
class ChatMessage:
    """The answer of the model. It may stand in the messages of the next call as it is."""

    content: str
    tool_calls: list[ToolCall] | None = None
    role: Literal["assistant"] = "assistant"

    def model_dump(self) -> dict[str, Any]:
        """Return it as a dict, as OpenAI's own does."""
        return asdict(self)


@dataclass(frozen=True)
class ChatChoice:
    """One of ``n`` answers."""

    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    completion: Completion
    """The tokens that were sampled, with log-probs and versions."""


@dataclass(frozen=True)
class ChatUsage:
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class ChatCompletion:
    """The result of ``client.chat.completions.create``, with the fields that OpenAI's has."""

    id: str
    choices: list[ChatChoice]
    usage: ChatUsage
    model: str = "rlcore"
    object: Literal["chat.completion"] = "chat.completion"


class RolloutClient:
    """Asks the samplers for completions, and keeps them.

    ``await client.generate(prompt, {"max_tokens": 64})`` takes a text or token ids;
    ``await client.chat.completions.create(messages=[...])`` takes messages, as OpenAI's asynchronous client does.

    Args:
        send: awaits the completions of one prompt.
        reader: of conversations; None refuses ``chat``.
        defaults: sampling parameters where a call gives none.
    """

    def __init__(
        self, send: Send, *, reader: Callable[[], ConversationReader] | None = None, defaults: ParamsLike = None
    ) -> None:
        self._send, self._reader, self._defaults = send, reader, SamplingParams.of(defaults)
        self.outputs: list[RequestOutput] = []
        """All that was sampled, in the order in which it ended."""
        self.chat = _Chat(ChatCompletions(self, reader))

    async def generate(self, prompt: PromptLike, sampling_params: ParamsLike = None) -> RequestOutput:
        """Sample completions of one prompt.

        Args:
            sampling_params: a ``SamplingParams``, or a dict of the fields that differ from the defaults.

        Raises:
            InvalidInputError: as ``InferenceEngine.generate``.
        """
        if isinstance(sampling_params, Mapping):
            unknown = SamplingParams.of(sampling_params)  # checks names and values
            sampling_params = replace(self._defaults, **{name: getattr(unknown, name) for name in sampling_params})
        [read] = prompts_of([prompt])
        output = await self._send(read, SamplingParams.of(sampling_params or self._defaults))
        self.outputs.append(output)
        return output

    @property
    def num_sampled(self) -> int:
        """The number of tokens that were sampled."""
        return sum(len(one.token_ids) for output in self.outputs for one in output.outputs)

    def sibling(self) -> RolloutClient:
        """Return a client for a part of the episode, such as one of several conversations; this one keeps its, too."""
        return RolloutClient(self.generate, reader=self._reader, defaults=self._defaults)

    def trajectories(self, reward: float = 0.0) -> list[Trajectory]:
        """Return the sequences that were sampled; turns of one conversation are one sequence.

        Args:
            reward: of each.
        """
        return [replace(one, reward=reward) for one in joined_turns(self.outputs)]


@dataclass(frozen=True)
class _Chat:
    completions: ChatCompletions


class ChatCompletions:
    """The completions of one client's conversations."""

    def __init__(self, client: RolloutClient, reader: Callable[[], ConversationReader] | None) -> None:
        self._client, self._make_reader = client, reader
        self._reader: ConversationReader | None = None

    @takes("create()", messages=ITERABLE, tools=optional(ITERABLE), extra_body=optional(MAPPING))
    async def create(
        self,
        *,
        messages: Iterable[Message | ChatMessage],
        tools: Iterable[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> ChatCompletion:
        """Sample the next answer of a conversation; see `rlcore.rollout.conversation` for its tokens.

        Args:
            messages: dicts with role and content, and the messages of earlier answers as they are.
            tools: descriptions of functions, for the chat template. Calls are read from the answer as
                ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the form of Hermes and Qwen.
            extra_body: more sampling parameters, such as ``{"top_k": 20}``.
            options: ``temperature``, ``top_p``, ``n`` and ``seed``; ``model`` and others that change no token are
                ignored.

        Raises:
            InvalidInputError: an unknown argument, or one out of range.
            UnsupportedError: ``stream``, ``stop`` texts and what else would change the answer.
        """
        if self._reader is None:
            if self._make_reader is None:
                raise UnsupportedError("client.chat", "this client was made without a tokenizer")
            self._reader = self._make_reader()
        params = {name: value for name, value in _sampling(options).items() if value is not None}
        if (limit := max_tokens if max_completion_tokens is None else max_completion_tokens) is not None:
            params["max_tokens"] = limit
        asked = [_plain_message(message) for message in messages]
        described = None if tools is None else list(tools)  # the template is written more than once
        prompt = self._reader.prompt(asked, described)
        output = await self._client.generate(prompt, params | dict(extra_body or {}))
        choices = [_choice(index, one, has_tools=bool(described)) for index, one in enumerate(output.outputs)]
        for choice in choices:
            self._reader.remember(asked, _plain_message(choice.message), prompt, choice.completion)
        sampled = sum(len(choice.completion.token_ids) for choice in choices)
        usage = ChatUsage(len(prompt), sampled, len(prompt) + sampled)
        return ChatCompletion(f"chatcmpl-{next(_numbers)}", choices, usage)


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters among the options of a call; refuse what would be ignored to no good."""
    known = (*_SAMPLING, *_IGNORED, *_DEFAULTS)
    for name, value in options.items():
        if name not in known:
            accepted = (*_NAMED, *known)
            hint = did_you_mean(name, accepted)
            raise InvalidInputError(f"create() has no argument {name!r}{hint or ';'} accepted: {', '.join(accepted)}")
        if name in _DEFAULTS and value is not None and value != _DEFAULTS[name]:
            raise UnsupportedError(f"create({name}={value!r})", f"leave it out, or give {_DEFAULTS[name]!r}")
    return {name: value for name, value in options.items() if name in _SAMPLING}


def _choice(index: int, completion: Completion, *, has_tools: bool) -> ChatChoice:
    calls = _tool_calls(completion.text) if has_tools else []
    content = _TOOL_CALL.sub("", completion.text).strip() if calls else completion.text
    message = ChatMessage(content, calls or None)
    return ChatChoice(index, message, "tool_calls" if calls else completion.finish_reason, completion)


def _tool_calls(text: str) -> list[ToolCall]:
    """Return the calls that a text has in the form of Hermes; what is no such JSON is no call."""
    found = []
    for body in _TOOL_CALL.findall(text):
        try:
            call = json.loads(body)
            function = FunctionCall(call["name"], json.dumps(call.get("arguments", {})))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        found.append(ToolCall(f"call-{next(_numbers)}", function))
    return found


def _plain_message(message: Message | ChatMessage | Any) -> dict[str, Any]:
    """Return a message as a dict without what is None, with the arguments of tool calls parsed, as templates want."""
    found = message.model_dump() if hasattr(message, "model_dump") else message
    plain = {name: value for name, value in found.items() if value is not None} if isinstance(found, Mapping) else {}
    if "role" not in plain:
        raise InvalidInputError(f"a message needs a role, such as 'user'; got {message!r:.200}")
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_parsed_call(call) for call in plain["tool_calls"]]
    return plain


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
        return {**call, "function": function}
    except (TypeError, KeyError, ValueError) as error:
        told = "a tool call is a dict with a function, whose arguments are JSON"
        raise InvalidInputError(f"{told}; got {call!r:.200}") from error
