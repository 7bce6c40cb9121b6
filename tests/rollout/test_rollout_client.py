"""Conversations, workflows and trajectories: the very tokens that were sampled, each trained on once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from rlcore.engines.sampling.completion import Completion, RequestOutput, VersionSpan
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.ops import decoupled_ppo, group_advantage
from rlcore.rollout import (
    Grouped,
    MultiTurn,
    RolloutClient,
    SingleTurn,
    Trajectory,
    collate_trajectories,
    conversation,
)
from rlcore.rollout.client import ChatCompletions
from rlcore.rollout.conversation import ConversationReader
from rlcore.rollout.workflow import Workflow
from tests.accuracy import assert_within_rounding

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}</s>\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Characters, and the pair "ab" as one token: tokenised again, a sampled "a", "b" would be another token."""
    tokenizers = pytest.importorskip("tokenizers", reason="chat needs a tokenizer")
    transformers = pytest.importorskip("transformers", reason="chat needs a tokenizer")
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {piece: number for number, piece in enumerate([*characters, "ab"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


class Says:
    """Answers what it was told to, one token a character, with a stop token unless the text ends with a tilde."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.texts, self.prompts, self.params = list(texts), [], []
        self._tokenizer = tokenizer

    async def __call__(self, prompt: Any, params: Any) -> RequestOutput:
        self.prompts.append(list(prompt))
        self.params.append(params)
        outputs = [self._completion(self.texts.pop(0)) for _ in range(params.n)]
        return RequestOutput(None, list(prompt), outputs)

    def _completion(self, text: str) -> Completion:
        is_stopped, text = not text.endswith("~"), text.removesuffix("~")
        token_ids = [self._tokenizer.convert_tokens_to_ids(character) for character in text]
        token_ids += [self._tokenizer.eos_token_id] * is_stopped
        spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, len(token_ids)))
        return Completion(token_ids, [-0.25] * len(token_ids), text, "stop" if is_stopped else "length", spans)


def client_of(says: Says, tokenizer: Any, template: str = TEMPLATE) -> RolloutClient:
    return RolloutClient(says, reader=lambda: ConversationReader(tokenizer, chat_template=template))


@pytest.mark.parametrize("first_answer", ["xaby", "xaby~"])
def test_a_conversation_goes_on_with_the_sampled_tokens_and_is_one_sequence(tokenizer: Any, first_answer: str) -> None:
    says = Says(tokenizer, first_answer, "z")
    client = client_of(says, tokenizer)
    messages: list[Any] = [{"role": "user", "content": "ab?"}]

    async def talk() -> None:
        answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=9, temperature=0.5)
        assert answer.choices[0].finish_reason == ("length" if first_answer.endswith("~") else "stop")
        assert answer.usage.total_tokens == len(says.prompts[0]) + len(answer.choices[0].completion.token_ids)
        messages.extend([answer.choices[0].message, {"role": "user", "content": "b"}])
        await client.chat.completions.create(messages=messages)

    asyncio.run(talk())
    first, second = says.prompts
    sampled = tokenizer.convert_tokens_to_ids(list("xaby"))
    behind = tokenizer("</s>\n<u>b</s>\n<a>", add_special_tokens=False).input_ids
    assert (says.params[0].max_tokens, says.params[0].temperature) == (9, 0.5)
    assert second == first + sampled + behind
    assert tokenizer.decode(second) == tokenizer.decode(first) + "xaby</s>\n<u>b</s>\n<a>"
    again = tokenizer(tokenizer.decode(second), add_special_tokens=False).input_ids
    assert len(again) == len(second) - 1  # "ab" would have become one token

    (one,) = client.trajectories(reward=2.0)
    num_sampled = len(sampled) + (not first_answer.endswith("~"))
    assert one.loss_mask == (
        [False] * len(first) + [True] * num_sampled + [False] * (len(second) - len(first) - num_sampled) + [True] * 2
    )
    assert one.token_ids[: len(second)] == second and one.reward == 2.0
    assert {v for v, is_sampled in zip(one.versions, one.loss_mask, strict=True) if not is_sampled} == {-1}
    assert (one.oldest_version, one.num_sampled) == (3, num_sampled + 2)


def test_a_template_that_rewrites_earlier_answers_begins_another_sequence(tokenizer: Any) -> None:
    """Reasoning models' templates leave out what the model thought before an earlier answer."""
    template = (
        "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' and not loop.last %}-{% else %}"
        "{{ m.content }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    says = Says(tokenizer, "thoughts", "z")
    client = client_of(says, tokenizer, template)
    messages: list[Any] = [{"role": "user", "content": "q"}]

    async def talk() -> None:
        answer = await client.chat.completions.create(messages=messages)
        messages.extend([answer.choices[0].message.model_dump(), {"role": "user", "content": "r"}])
        await client.chat.completions.create(messages=messages)

    asyncio.run(talk())
    assert tokenizer.decode(says.prompts[1]) == "<u>q</s><a>-</s><u>r</s><a>"
    assert [one.num_sampled for one in client.trajectories()] == [9, 2]


def test_tools_are_called_and_what_they_raise_is_their_answer(tokenizer: Any) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    wrong = '<tool_call>{"name": "add", "arguments": {"c": 1}}</tool_call>'
    says = Says(tokenizer, wrong + call, '<tool_call>{"name": "no", "arguments": {}}</tool_call>', "3")
    seen: list[Any] = []

    def reward(data: Any, messages: Sequence[Any]) -> float:
        seen.extend(messages)
        return 1.0

    workflow = MultiTurn(reward, {"add": add}, max_turns=5)
    client = client_of(says, tokenizer)
    found = asyncio.run(workflow.run_episode(client, {"messages": [{"role": "user", "content": "1+2?"}]}))
    told = [message["content"] for message in seen if message["role"] == "tool"]
    assert told[0].startswith("error: TypeError: ") and told[1:] == ["3", "error: there is no tool 'no'; there are add"]
    assert seen[-1]["content"] == "3" and len(found) == 1 and found[0].reward == 1.0
    assert found[0].num_sampled == sum(len(output.outputs[0].token_ids) for output in client.outputs)


QUESTION = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"messages": "q"}, "create() takes a list or another iterable as messages, got 'q'"),
        ({"messages": b"q"}, "create() takes a list or another iterable as messages, got b'q'"),
        ({"messages": QUESTION}, "create() takes a list or another iterable as messages, got {'role'"),
        ({"messages": 3}, "create() takes a list or another iterable as messages, got 3"),
        ({"messages": [3]}, "a message needs a role, such as 'user'; got 3"),
        ({"messages": [None]}, "a message needs a role, such as 'user'; got None"),
        ({"messages": []}, "the chat template cannot write these messages: ValueError: Cannot apply chat template to"),
        ({"messages": [QUESTION], "tools": "search"}, "create() takes a list or another iterable, or None as"),
        ({"messages": [QUESTION], "tools": [3]}, "the chat template cannot write these messages: ValueError: Tools"),
        ({"messages": [QUESTION], "extra_body": [1]}, "create() takes a mapping, or None as extra_body, got [1]"),
        ({"messages": [QUESTION], "max_completion_tokens": 0}, "SamplingParams.max_tokens must be at least 1, got 0"),
        ({"messages": [QUESTION | {"tool_calls": [3]}]}, "a tool call is a dict with a function, whose arguments are"),
        ({"messages": [QUESTION | {"tool_calls": [{"id": "1"}]}]}, "a tool call is a dict with a function, whose"),
        ({"messages": [QUESTION | {"tool_calls": [{"function": {"arguments": "{"}}]}]}, "a tool call is a dict with"),
    ],
)
def test_wrong_arguments_of_create_are_one_line(tokenizer: Any, arguments: dict[str, Any], told: str) -> None:
    create = client_of(Says(tokenizer), tokenizer).chat.completions.create
    with pytest.raises(InvalidInputError) as caught:
        asyncio.run(create(**arguments))
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)


def test_messages_and_tools_may_come_from_generators(tokenizer: Any) -> None:
    says, template = Says(tokenizer), "{% for t in tools %}{{ t.function.name }}{% endfor %}" + TEMPLATE
    tools = [{"type": "function", "function": {"name": name}} for name in ("find", "run")]
    talk = [QUESTION, {"role": "assistant", "content": "xab"}, QUESTION]
    for made in (list, iter):
        client = client_of(says, tokenizer, template)
        for messages in (talk[:1], talk):
            says.texts = ["xab"]
            asyncio.run(client.chat.completions.create(messages=made(messages), tools=made(tools)))
    assert says.prompts[:2] == says.prompts[2:]


def test_create_is_a_coroutine_function_as_that_of_openai_is() -> None:
    """Who mocks it, or calls it again after an error, asks."""
    assert inspect.iscoroutinefunction(ChatCompletions.create)
    with mock.patch.object(ChatCompletions, "create") as create:
        assert isinstance(create, mock.AsyncMock)


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('no system message') }}"])
def test_a_template_that_fails_is_named(tokenizer: Any, template: str) -> None:
    create = client_of(Says(tokenizer), tokenizer, template).chat.completions.create
    with pytest.raises(
        InvalidInputError, match=r"the chat template cannot write these messages: Template(Syntax)?Error"
    ):
        asyncio.run(create(messages=[QUESTION]))


def test_what_would_change_an_answer_unseen_is_refused(tokenizer: Any) -> None:
    client = client_of(Says(tokenizer, "x", "y"), tokenizer)
    create = client.chat.completions.create
    messages = [{"role": "user", "content": "q"}]
    with pytest.raises(UnsupportedError, match=r"create\(stream=True\) is not supported: leave it out"):
        asyncio.run(create(messages=messages, stream=True))
    with pytest.raises(InvalidInputError, match=r"'max_token'; did you mean 'max_tokens'\? accepted: messages,"):
        asyncio.run(create(messages=messages, max_token=1))
    with pytest.raises(InvalidInputError, match="no argument 'temprature'; did you mean 'temperature'"):
        asyncio.run(create(messages=messages, temprature=1))
    with pytest.raises(InvalidInputError, match="a message needs a role"):
        asyncio.run(create(messages=[{"content": "q"}]))
    answer = asyncio.run(create(messages=messages, n=2, extra_body={"top_k": 3}, user="me"))
    assert [choice.message.content for choice in answer.choices] == ["x", "y"]
    with pytest.raises(UnsupportedError, match="this client was made without a tokenizer"):
        asyncio.run(RolloutClient(Says(tokenizer)).chat.completions.create(messages=messages))
    with pytest.raises(InvalidInputError, match="the tokenizer has no chat template; give chat_template="):
        ConversationReader(tokenizer)
    with pytest.raises(InvalidInputError, match="the model folder has none; give tokenizer="):
        ConversationReader(None)


def test_without_a_tokenizer_the_first_chat_reads_that_of_the_model_folder(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(conversation, "check_model_folder", lambda path: read.append(path) or path)
    monkeypatch.setattr(conversation, "load_tokenizer", lambda folder: tokenizer)
    engine: Any = SimpleNamespace(path="folder")
    messages, prompts = [{"role": "user", "content": "q"}], []
    for given in (tokenizer, None):
        make = conversation.reader_of(given, engine, chat_template=TEMPLATE, options=None)
        assert read == []
        prompts += [make().prompt(messages, None) for _ in range(2)]
    assert read == ["folder"]
    assert prompts[1:] == prompts[:-1] and tokenizer.decode(prompts[0]).startswith("<u>q")


def test_rewards_of_one_answer_of_a_group_and_of_groups_of_episodes(tokenizer: Any) -> None:
    lengths = SingleTurn(lambda data, text: len(text), {"n": 3})
    client = RolloutClient(Says(tokenizer, "a", "bcd", "ef"))
    assert [one.reward for one in asyncio.run(lengths.run_episode(client, {"prompt": [1]}))] == [1, 3, 2]

    def longest(data: Any, texts: Sequence[str]) -> list[float]:
        return [float(text == max(texts, key=len)) for text in texts]

    best = SingleTurn(longest, {"n": 3}, is_group_reward=True, prompt=lambda data: [data])
    client = RolloutClient(Says(tokenizer, "a", "bcd", "ef"))
    group = asyncio.run(best.run_episode(client, 5))
    assert [one.reward for one in group] == [0, 1, 0] and [one.extra["text"] for one in group] == ["a", "bcd", "ef"]

    def minus_mean(data: Any, rewards: list[float]) -> list[float]:
        return [reward - sum(rewards) / len(rewards) for reward in rewards]

    single = SingleTurn(lambda data, text: len(text), {"max_tokens": 4})
    client = RolloutClient(Says(tokenizer, "a", "bcd"))
    grouped = Grouped(single, 2, group_reward=minus_mean)
    assert [one.reward for one in asyncio.run(grouped.run_episode(client, {"prompt": [1]}))] == [-1, 1]
    assert client.num_sampled == 6

    class Rejects(Workflow):
        async def run_episode(self, client: RolloutClient, data: Any) -> None:
            return None

    assert asyncio.run(Grouped(Rejects(), 2).run_episode(client, 0)) is None
    few = SingleTurn(lambda data, texts: [1.0], {"n": 2}, is_group_reward=True)
    with pytest.raises(InvalidInputError, match=r"must give 2 rewards, one for each of the completions; got \[1"):
        asyncio.run(few.run_episode(RolloutClient(Says(tokenizer, "a", "b")), {"prompt": [1]}))
    number = Grouped(single, 2, group_reward=lambda data, rewards: sum(rewards))  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidInputError, match="must give 2 rewards, one for each of the episodes; got 2"):
        asyncio.run(number.run_episode(RolloutClient(Says(tokenizer, "a", "b")), {"prompt": [1]}))
    with pytest.raises(InvalidInputError, match="an item needs a 'prompt', or give prompt="):
        asyncio.run(lengths.run_episode(client, {}))
    with pytest.raises(InvalidInputError, match="samples one answer a turn"):
        MultiTurn(len, {}, sampling_params={"n": 2})


def test_a_reward_may_be_given_at_once_or_awaited(tokenizer: Any) -> None:
    """As by a function that asks a server for what its cache does not have."""

    async def asked(text: str) -> int:
        await asyncio.sleep(0)
        return len(text)

    mixed = SingleTurn(lambda data, text: asked(text) if text > "b" else -1, {"n": 4})
    client = RolloutClient(Says(tokenizer, "a", "bcd", "aa", "ef"))
    assert [one.reward for one in asyncio.run(mixed.run_episode(client, {"prompt": [1]}))] == [-1, 3, -1, 2]


def test_decoupled_ppo_takes_a_batch_of_trajectories() -> None:
    one = Trajectory([1, 2, 3], [False, True, True], [0.0, -0.5, -1.0], [-1, 0, 1], reward=1.0)
    other = Trajectory([4, 5], [False, True], [0.0, -2.0], [-1, 1])
    batch = collate_trajectories([[one, other], [other]])
    assert batch["versions"].tolist() == [[-1, 0, 1], [-1, 1, -1], [-1, 1, -1]]
    assert (batch["group"].tolist(), batch["rewards"].tolist()) == ([0, 0, 1], [1, 0, 0])
    batch["old_logprobs"] = batch["old_logprobs"] - 0.1 * batch["loss_mask"]  # the trainer's, one version later
    advantages = group_advantage(batch["rewards"], group=batch["group"])
    per_token = {"advantages": advantages[:, None].expand(3, 3)} | batch
    mask = batch["loss_mask"]
    rows = {name: values[mask] for name, values in per_token.items() if values.shape == mask.shape}
    logprob = rows["old_logprobs"].clone().requires_grad_()
    value, stats = decoupled_ppo()(logprob, None, rows)
    weight = torch.exp(torch.tensor(-0.1, dtype=torch.float64))
    expected = -weight.double() * rows["advantages"].double()  # a difference, two exp, two products
    assert_within_rounding(value.detach(), expected, terms=12, magnitude=expected.abs())
    value.sum().backward()
    assert logprob.grad is not None and bool(logprob.grad.any()) and stats


@pytest.mark.parametrize("reward", [np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0)])
def test_a_reward_may_be_a_scalar_of_numpy_or_torch(reward: Any) -> None:
    found = Trajectory([1], [True], [0.0], [0], reward=reward)
    assert found.reward == 1 and type(found.reward) in (float, int, bool)
    with pytest.raises(InvalidInputError, match=r"must be a finite number, got tensor\(\[1\.\]\)"):
        Trajectory([1], [True], [0.0], [0], reward=torch.tensor([1.0]))  # type: ignore[arg-type]


def test_trajectories_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="of one length of at least 1, got 2, 1, 2, 2"):
        Trajectory([1, 2], [True], [0.0, 0.0], [0, 0])
    with pytest.raises(InvalidInputError, match="must be a finite number, got nan"):
        Trajectory([1], [True], [0.0], [0], reward=float("nan"))
    with pytest.raises(InvalidInputError, match="needs at least one trajectory, got none"):
        collate_trajectories([[]])


def test_turns_keep_the_experts_with_which_each_token_was_sampled() -> None:
    def sampled(tokens: list[int], ran: int, expert: int) -> Completion:
        spans = (VersionSpan(0, 0, len(tokens)),)
        return Completion(tokens, [-1.0] * len(tokens), "", "stop", spans, torch.full((ran, 2, 1), expert))

    first = Trajectory.of([1, 2], sampled([3, 4], ran=3, expert=5))
    both = first.followed_by([1, 2, 3, 4, 6], sampled([7, 8], ran=6, expert=9))
    assert both is not None
    assert both.routed_experts is not None
    assert both.routed_experts[:, 0, 0].tolist() == [5, 5, 5, 9, 9, 9]
    assert both.plain()["routed_experts"] is None
    routes = collate_trajectories([[both, Trajectory([1], [True], [-1.0], [0])]])["routed_experts"]
    assert routes[:, :, 1, 0].tolist() == [[5, 5, 5, 9, 9, 9, -1], [-1] * 7]
