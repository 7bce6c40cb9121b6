"""Workflows: what one episode does. Three common ones, and the class to write your own.

A workflow runs in the controller's event loop beside many others: it awaits completions and rewards, and does not
compute. A reward function that computes belongs in a ``RewardPool``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlcore.arguments import COUNT, FLAG, LIST, Kind, kind_of, optional, takes
from rlcore.engines.sampling.completion import Completion
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import ParamsLike, PromptLike
from rlcore.errors import InvalidInputError
from rlcore.rollout.client import ChatChoice, RolloutClient
from rlcore.rollout.reward_pool import RewardPool
from rlcore.rollout.trajectory import Trajectory

Result = Trajectory | Sequence[Trajectory] | None
Tools = Mapping[str, Callable[..., Any]]
_FUNCTION = Kind("a function", callable)
_POOL = kind_of("a RewardPool", RewardPool)
_TOOLS = Kind(
    "a mapping of names to functions",
    lambda value: isinstance(value, Mapping) and all(map(callable, value.values())),
)


class Workflow(ABC):
    """Says what an episode does with one item of data."""

    @abstractmethod
    async def run_episode(self, client: RolloutClient, data: Any) -> Result:
        """Sample, compute rewards, and return what is trained on.

        Args:
            client: this episode's own; it asks the samplers and keeps what they answer.
            data: one item, as it was submitted.

        Returns:
            A ``Trajectory`` or several; None rejects the episode. ``client.trajectories(reward)`` has all that was
            sampled.
        """


WORKFLOW = Kind(
    "a Workflow, with `async def run_episode(client, data)`,",
    lambda value: hasattr(value, "run_episode") and not isinstance(value, type),
)


class SingleTurn(Workflow):
    """One prompt, ``n`` completions, a reward for each.

    Args:
        reward: ``reward(data, text) -> float``; or, with ``is_group_reward``, ``reward(data, texts) -> [float, ...]``,
            which sees all completions of the prompt.
        sampling_params: such as ``{"n": 8, "max_tokens": 512}``.
        prompt: ``prompt(data)`` returns what ``InferenceEngine.generate`` takes as one; None takes ``data["prompt"]``.
        pool: calls ``reward`` in processes with a deadline; None calls it in the event loop.
    """

    @takes("SingleTurn", reward=_FUNCTION, prompt=optional(_FUNCTION), is_group_reward=FLAG, pool=optional(_POOL))
    def __init__(
        self,
        reward: Callable[..., Any],
        sampling_params: ParamsLike = None,
        *,
        prompt: Callable[[Any], PromptLike] | None = None,
        is_group_reward: bool = False,
        pool: RewardPool | None = None,
    ) -> None:
        self._reward, self._prompt, self._pool = reward, prompt or _prompt_of, pool
        self._params, self._is_group_reward = SamplingParams.of(sampling_params), is_group_reward

    async def run_episode(self, client: RolloutClient, data: Any) -> list[Trajectory]:
        output = await client.generate(self._prompt(data), self._params)
        rewards = await self._rewards(data, output.outputs)
        return [
            Trajectory.of(output.prompt_token_ids, completion, reward=reward, inputs=output.inputs)
            for completion, reward in zip(output.outputs, rewards, strict=True)
        ]

    async def _rewards(self, data: Any, completions: Sequence[Completion]) -> list[float]:
        texts = [completion.text for completion in completions]
        if not self._is_group_reward and self._pool is None:
            # A task for each would cost more than all else that is done for an episode.
            found = [self._reward(data, text) for text in texts]
            if awaited := [one for one in found if inspect.isawaitable(one)]:  # all, or those that no cache answers
                answers = iter(await together(awaited))
                found = [next(answers) if inspect.isawaitable(one) else one for one in found]
            return found
        if not self._is_group_reward:
            return await together(_called(self._pool, self._reward, data, text) for text in texts)
        return _one_each(await _called(self._pool, self._reward, data, texts), len(texts), "completions")


class MultiTurn(Workflow):
    """A conversation with tools: the model answers, its tool calls are run and answered, until it calls none.

    Args:
        reward: ``reward(data, messages) -> float``, for the whole conversation.
        tools: name -> function, called with the arguments that the model gave; it may be a coroutine function. What
            it raises is the tool's answer, as a text, so that the model can mend its call.
        tool_descriptions: in the form of OpenAI's ``tools``; None writes name and docstring of each function.
        sampling_params: of each turn; ``n`` is 1.
        messages: ``messages(data)`` returns the first messages; None takes ``data["messages"]``.
        max_turns: the most answers of the model.
        pool: as in ``SingleTurn``.
    """

    @takes(
        "MultiTurn",
        reward=_FUNCTION,
        tools=_TOOLS,
        tool_descriptions=optional(LIST),
        messages=optional(_FUNCTION),
        max_turns=COUNT,
        pool=optional(_POOL),
    )
    def __init__(
        self,
        reward: Callable[..., Any],
        tools: Tools,
        *,
        tool_descriptions: Sequence[Mapping[str, Any]] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        messages: Callable[[Any], Sequence[Mapping[str, Any]]] | None = None,
        max_turns: int = 8,
        pool: RewardPool | None = None,
    ) -> None:
        if SamplingParams.of(sampling_params).n > 1:
            raise InvalidInputError("MultiTurn samples one answer a turn; for several conversations wrap it: Grouped()")
        self._reward, self._tools, self._max_turns, self._pool = reward, dict(tools), max_turns, pool
        self._descriptions = list(tool_descriptions or (_description(name, tools[name]) for name in tools))
        self._params, self._messages = dict(sampling_params or {}), messages or _messages_of

    async def run_episode(self, client: RolloutClient, data: Any) -> list[Trajectory]:
        messages = list(self._messages(data))
        for _ in range(self._max_turns):
            answer = await client.chat.completions.create(
                messages=messages, tools=self._descriptions, extra_body=self._params
            )
            messages.append(answer.choices[0].message.model_dump())
            if answer.choices[0].finish_reason != "tool_calls":
                break
            messages += await self._tool_answers(answer.choices[0])
        return client.trajectories(await _called(self._pool, self._reward, data, messages))

    async def _tool_answers(self, choice: ChatChoice) -> list[dict[str, Any]]:
        calls = choice.message.tool_calls or []
        contents = await together(self._run_tool(call.function) for call in calls)
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": content}
            for call, content in zip(calls, contents, strict=True)
        ]

    async def _run_tool(self, call: Any) -> str:
        if call.name not in self._tools:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._tools)}"
        try:
            found = self._tools[call.name](**json.loads(call.arguments))
            return str(await found if inspect.isawaitable(found) else found)
        except Exception as error:  # the tool's own, for the model to read
            return f"error: {type(error).__name__}: {error}"


class Grouped(Workflow):
    """Several episodes of another workflow with the same item, as one group.

    Args:
        workflow: the other one.
        n: how many.
        group_reward: ``group_reward(data, rewards) -> rewards``, of the n episodes; None leaves them.
    """

    @takes("Grouped", workflow=WORKFLOW, n=COUNT, group_reward=optional(_FUNCTION))
    def __init__(
        self,
        workflow: Workflow,
        n: int,
        *,
        group_reward: Callable[[Any, list[float]], Sequence[float]] | None = None,
    ) -> None:
        self._workflow, self._n, self._group_reward = workflow, n, group_reward

    async def run_episode(self, client: RolloutClient, data: Any) -> list[Trajectory] | None:
        """Run the episodes together; if one is rejected, the group is."""
        clients = [client.sibling() for _ in range(self._n)]
        results = await together(self._workflow.run_episode(one, data) for one in clients)
        groups = [as_trajectories(result) for result in results]
        if not all(groups):
            return None
        rewards = [group[-1].reward for group in groups]
        if self._group_reward is not None:
            rewards = _one_each(self._group_reward(data, rewards), len(groups), "episodes")
        return [replace(one, reward=reward) for group, reward in zip(groups, rewards, strict=True) for one in group]


def as_trajectories(result: Any) -> list[Trajectory]:
    """Return the result of a workflow as a list, [] if it was rejected.

    Raises:
        InvalidInputError: it is something else.
    """
    found = [] if result is None else [result] if isinstance(result, Trajectory) else result
    if not isinstance(found, list | tuple) or not all(isinstance(one, Trajectory) for one in found):
        raise InvalidInputError(
            f"run_episode() must return a Trajectory, a list of them, or None to reject; got {result!r:.200}"
        )
    return list(found)


async def together(coroutines: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all of them; when one fails, or this is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


async def _called(pool: RewardPool | None, function: Callable[..., Any], *args: Any) -> Any:
    if pool is not None:
        return await pool(function, *args)
    found = function(*args)
    return await found if inspect.isawaitable(found) else found


def _one_each(rewards: Any, wanted: int, what: str) -> list[float]:
    """Return the rewards of a group as a list of as many as ``wanted``."""
    if not isinstance(rewards, Iterable) or len(found := list(rewards)) != wanted:
        raise InvalidInputError(
            f"a group reward must give {wanted} rewards, one for each of the {what}; got {rewards!r:.200}"
        )
    return found


def _prompt_of(data: Any) -> PromptLike:
    prompt: PromptLike = _entry(data, "prompt")
    return prompt


def _messages_of(data: Any) -> Sequence[Mapping[str, Any]]:
    messages: Sequence[Mapping[str, Any]] = _entry(data, "messages")
    return messages


def _entry(data: Any, name: str) -> Any:
    try:
        return data[name]
    except (TypeError, KeyError, IndexError) as error:
        raise InvalidInputError(
            f"an item needs a {name!r}, or give {name}=, a function of it; got {data!r:.200}"
        ) from error


def _description(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = {one: {"type": "string"} for one in inspect.signature(function).parameters}
    except ValueError as error:  # of a function that is written in C
        raise InvalidInputError(f"MultiTurn needs tool_descriptions= for the tool {name!r}: {error}") from error
    about = {"name": name, "description": inspect.getdoc(function) or name}
    return {"type": "function", "function": about | {"parameters": {"type": "object", "properties": parameters}}}
