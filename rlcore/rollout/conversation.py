"""Prompts of conversations as token ids: what the model sampled is never tokenised again.

A chat template gives the text of all messages. Of a conversation that goes on, only the text after the sampled answer
is tokenised: what the template writes behind an answer, the messages that follow, and the beginning of the next answer.
It comes after the very ids that the model saw and sampled. Where the template writes earlier messages in another way
once others follow (some leave out earlier reasoning), the whole text is tokenised, because that is what the model is to
see: then another sequence begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcore.engines.sampling.completion import Completion
from rlcore.engines.sampling.model_folder import check_model_folder, load_tokenizer
from rlcore.errors import InvalidInputError, one_line

if TYPE_CHECKING:
    from rlcore.engines.inference import InferenceEngine

Message = Mapping[str, Any]
_MARK = "\u2063answer\u2063"
"""A text that stands in no template: what comes behind it is what the template writes behind an answer."""


class ConversationReader:
    """Turns messages into token ids, and remembers the conversations that the model has answered.

    Args:
        tokenizer: a tokenizer of transformers.
        chat_template: a Jinja template; None takes the tokenizer's own.
        options: passed to the template, such as ``{"enable_thinking": False}``.
    """

    def __init__(
        self, tokenizer: Any, *, chat_template: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        if tokenizer is None:
            raise InvalidInputError("chat needs a tokenizer, and the model folder has none; give tokenizer=")
        if chat_template is None and getattr(tokenizer, "chat_template", None) is None:
            raise InvalidInputError("the tokenizer has no chat template; give chat_template=, a Jinja template")
        self._tokenizer, self._options = tokenizer, {"chat_template": chat_template, **(options or {})}
        self._answered: list[tuple[list[Message], list[int], bool]] = []
        """Messages with the answer, token ids of both, and whether the last one is a stop token."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Return the token ids for the next answer."""
        whole = self._text(messages, tools, begins_answer=True)
        known = [one for one in self._answered if list(messages[: len(one[0])]) == one[0]]
        for answered, token_ids, is_stopped in sorted(known, key=lambda one: -len(one[0])):
            before = self._text(answered, tools)
            if whole.startswith(before):
                behind = self._behind_answer(answered, tools, token_ids[-1] if is_stopped else None)
                if behind is not None:
                    return token_ids + self._tokens(behind + whole[len(before) :])
        return self._tokens(whole)

    def remember(self, messages: Sequence[Message], answer: Message, prompt: list[int], sampled: Completion) -> None:
        """Note what the model answered, so that a conversation that goes on from there has the same tokens."""
        self._answered.append(([*messages, answer], prompt + list(sampled.token_ids), sampled.finish_reason == "stop"))

    def _behind_answer(self, answered: list[Message], tools: Any, stop_token: int | None) -> str | None:
        """Return what the template writes behind the last message, less a stop token that was sampled."""
        marked = self._text([*answered[:-1], {"role": "assistant", "content": _MARK}], tools)
        _, mark, behind = marked.rpartition(_MARK)
        if not mark:
            return None
        stop = "" if stop_token is None else self._tokenizer.decode([stop_token])
        return behind.removeprefix(stop)

    def _text(self, messages: Sequence[Message], tools: Any, *, begins_answer: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=begins_answer, **self._options
            )
        except Exception as error:  # of Jinja, of the template itself, or of transformers
            raise InvalidInputError(f"the chat template cannot write these messages: {one_line(error)}") from error
        return text

    def _tokens(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return token_ids


def reader_of(
    tokenizer: Any, engine: InferenceEngine, *, chat_template: str | None, options: Mapping[str, Any] | None
) -> Callable[[], ConversationReader]:
    """Return the function that makes readers. Without a tokenizer the first call loads that of the model folder."""

    @functools.cache
    def known() -> Any:
        return load_tokenizer(check_model_folder(engine.path)) if tokenizer is None else tokenizer

    return lambda: ConversationReader(known(), chat_template=chat_template, options=options)
