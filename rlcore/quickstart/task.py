"""The quickstart's task: two-digit addition, answered least significant digit first, and its forgetful teacher.

    prompt     47+85=        each number with two digits
    answer     231           132 backwards: as many digits as the sum has, at least two

Backwards, each digit of the answer depends on two digits of the prompt and one carry. The supervised warm-start
imitates a teacher that forgets each carry with probability 0.65. The teacher is right 49.03 % of the time, and its
likeliest answers, which are what a perfect imitator gives when it is asked greedily, 30.25 %. So imitation does not
lead to the right answers, but makes them likely enough for reinforcement learning to find them.

Everything is plain text, so that any tokenizer works. Unordered pairs are held out: if 47+85 is evaluated, 85+47 is
not trained on either.

Letters: N sequences, L longest sequence.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError

FORGET_PROBABILITY = 0.65
IGNORED = -100
"""Label of a token that is not imitated, as in torch's cross entropy and in transformers."""

Split = Literal["train", "gate", "held-out"]
_SPLIT_SIZE = 512  # of gate and of held-out: the standard error of an accuracy is at most 2.2 points
_FIRST_DIGITS = re.compile(r"\s*([0-9]+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """a + b; both in [0, 99]."""

    a: int
    b: int


def problems(split: Split, *, seed: int) -> list[Problem]:
    """Return the problems of a split; one seed always gives the same ones in the same order.

    Problems with either carry, with both and with none have the same shares in every split and for every seed, so that
    the teacher is right as often in each.

    Args:
        split: "held-out", 512 problems, for the accuracy that is reported; "gate", 512, for deciding when the
            warm-start is done; "train", the other pairs in both orders, about 8,000.
        seed: decides which pair is in which split.
    """
    pairs = [Problem(a, b) for a in range(100) for b in range(a, 100)]
    shuffle = random.Random(seed)
    shuffle.shuffle(pairs)
    turned = [pair if shuffle.random() < 0.5 else Problem(pair.b, pair.a) for pair in pairs]
    by_carries = sorted(turned, key=_carries)
    held_out, gate = (
        {by_carries[i * len(turned) // _SPLIT_SIZE + offset] for i in range(_SPLIT_SIZE)} for offset in (0, 1)
    )
    match split:
        case "held-out":
            return [pair for pair in turned if pair in held_out]
        case "gate":
            return [pair for pair in turned if pair in gate]
        case "train":
            rest = [pair for pair in turned if pair not in held_out | gate]
            return rest + [Problem(pair.b, pair.a) for pair in rest if pair.a != pair.b]
    raise InvalidInputError(f"split must be 'train', 'gate' or 'held-out', got {split!r}")


def _carries(problem: Problem) -> tuple[bool, bool]:
    """Return whether the units have a carry, and whether the sum has three digits."""
    return problem.a % 10 + problem.b % 10 >= 10, problem.a + problem.b >= 100


def draw(source: Sequence[Problem], count: int, generator: torch.Generator) -> list[Problem]:
    """Return ``count`` different problems, drawn with a CPU ``generator``."""
    if not 1 <= count <= len(source):
        raise InvalidInputError(f"count must be from 1 to the {len(source)} problems there are, got {count!r}")
    chosen = torch.randperm(len(source), generator=generator)[:count]
    return [source[i] for i in chosen.tolist()]


def prompt_text(problem: Problem) -> str:
    return f"{problem.a:02d}+{problem.b:02d}="


def answer_text(problem: Problem) -> str:
    return written_answer(problem, carries_kept=(True, True))


def written_answer(problem: Problem, *, carries_kept: tuple[bool, bool]) -> str:
    """Return the digits of the sum if the carry of the units and that of the tens are each kept, or forgotten."""
    units = problem.a % 10 + problem.b % 10
    tens = problem.a // 10 + problem.b // 10 + (units >= 10 and carries_kept[0])
    hundreds = "1" if tens >= 10 and carries_kept[1] else ""
    return f"{units % 10}{tens % 10}{hundreds}"


def teacher_texts(asked: Sequence[Problem], generator: torch.Generator) -> list[str]:
    """Return the forgetful teacher's answers, drawn with a CPU ``generator``."""
    kept_N2 = torch.rand(len(asked), 2, generator=generator) >= FORGET_PROBABILITY
    return [
        written_answer(problem, carries_kept=(kept[0], kept[1]))
        for problem, kept in zip(asked, kept_N2.tolist(), strict=True)
    ]


def reward(problem: Problem, text: str) -> float:
    """Return 1.0 if ``text`` begins with the answer, else 0.0.

    The answer is the first run of digits after any white space. Later text is ignored, because another model may add
    words, or have another end of sequence. A digit too many makes the answer wrong.
    """
    found = _FIRST_DIGITS.match(text)
    return float(found is not None and found[1] == answer_text(problem))


def accuracy(asked: Sequence[Problem], texts: Sequence[str]) -> float:
    """Return the mean reward, in [0, 1]."""
    return sum(reward(problem, text) for problem, text in zip(asked, texts, strict=True)) / len(asked)


def prompt_tokens(problem: Problem, tokenizer: Any) -> list[int]:
    """Return the prompt's token ids, with the tokens that the tokenizer puts before every text."""
    tokens: list[int] = tokenizer(prompt_text(problem)).input_ids
    return tokens


def answer_tokens(text: str, tokenizer: Any) -> list[int]:
    """Return the token ids of an answer, the end of sequence included."""
    if tokenizer.eos_token_id is None:
        raise InvalidInputError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, which ends an answer; "
            "set eos_token in its tokenizer_config.json"
        )
    tokens: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return [*tokens, tokenizer.eos_token_id]


def max_answer_tokens(tokenizer: Any) -> int:
    """Return the tokens of the longest answer, the end of sequence included: ``max_tokens`` for sampling."""
    every_sum = (Problem(total // 2, total - total // 2) for total in range(199))
    return max(len(answer_tokens(answer_text(problem), tokenizer)) for problem in every_sum)


def imitation_batch(
    source: Sequence[Problem], size: int, tokenizer: Any, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw problems from ``source``, with the teacher's answers as labels.

    Returns:
        ``input_ids`` [N, L] int64, padded on the right; ``attention_mask`` [N, L] int64, 1 for tokens that count;
        ``labels`` [N, L] int64: the token itself where it belongs to the answer (label t is for token t, as
        transformers' ``model(labels=...)`` takes them), else ``IGNORED``.
    """
    asked = draw(source, size, generator)
    return answer_batch(asked, teacher_texts(asked, generator), tokenizer)


def answer_batch(asked: Sequence[Problem], texts: Sequence[str], tokenizer: Any) -> dict[str, Tensor]:
    """Return the prompts with an answer each, as ``imitation_batch`` does."""
    prompts = [prompt_tokens(problem, tokenizer) for problem in asked]
    answers = [answer_tokens(text, tokenizer) for text in texts]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    input_ids_NL = torch.zeros(len(asked), longest, dtype=torch.int64)  # token 0 is in every vocabulary
    attention_mask_NL = torch.zeros_like(input_ids_NL)
    labels_NL = torch.full_like(input_ids_NL, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = len(prompt), len(prompt) + len(answer)
        input_ids_NL[row, :end] = torch.tensor(prompt + answer)
        attention_mask_NL[row, :end] = 1
        labels_NL[row, start:end] = torch.tensor(answer)
    return {"input_ids": input_ids_NL, "attention_mask": attention_mask_NL, "labels": labels_NL}
