"""The task's numbers are computed over all its problems, not sampled, wherever they can be."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.errors import InvalidInputError
from rlcore.quickstart.model import CHARACTERS, quickstart_model
from rlcore.quickstart.task import (
    FORGET_PROBABILITY,
    IGNORED,
    Problem,
    accuracy,
    answer_text,
    answer_tokens,
    draw,
    imitation_batch,
    max_answer_tokens,
    problems,
    prompt_text,
    prompt_tokens,
    reward,
    teacher_texts,
    written_answer,
)

EVERY_PROBLEM = [Problem(a, b) for a, b in itertools.product(range(100), repeat=2)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder: Path = quickstart_model(seed=0, cache=tmp_path_factory.mktemp("cache"))
    return AutoTokenizer.from_pretrained(folder)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_answers_are_the_sum_backwards() -> None:
    assert prompt_text(Problem(47, 85)) == "47+85="
    assert answer_text(Problem(47, 85)) == "231"
    assert prompt_text(Problem(7, 5)) == "07+05="
    for problem in EVERY_PROBLEM:
        assert answer_text(problem)[::-1] == f"{problem.a + problem.b:02d}"


def test_a_forgotten_carry_is_missing_from_the_next_digit() -> None:
    assert written_answer(Problem(47, 85), carries_kept=(False, True)) == "221"
    assert written_answer(Problem(47, 85), carries_kept=(True, False)) == "23"
    assert written_answer(Problem(47, 52), carries_kept=(False, False)) == "99"  # has no carry to forget
    assert written_answer(Problem(47, 55), carries_kept=(False, True)) == "29"  # nor then a second one


def teachers_accuracy(asked: list[Problem]) -> float:
    kept, right = 1 - FORGET_PROBABILITY, 0.0
    for problem, carries in itertools.product(asked, itertools.product((True, False), repeat=2)):
        probability = (kept if carries[0] else 1 - kept) * (kept if carries[1] else 1 - kept)
        right += probability * reward(problem, written_answer(problem, carries_kept=carries))
    return right / len(asked)


def test_the_teacher_is_right_49_percent_of_the_time_and_its_imitator_30() -> None:
    imitator = 0.0
    for problem in EVERY_PROBLEM:
        # Whether to carry is decided at each digit anew, so the likeliest digit is the one without the carry.
        imitator += reward(problem, written_answer(problem, carries_kept=(False, False)))
    assert teachers_accuracy(EVERY_PROBLEM) == pytest.approx(0.49031875)
    assert imitator / len(EVERY_PROBLEM) == pytest.approx(0.3025)


@pytest.mark.slow
def test_the_sampled_teacher_forgets_as_often_as_computed() -> None:
    texts = teacher_texts(EVERY_PROBLEM, generator())
    assert accuracy(EVERY_PROBLEM, texts) == pytest.approx(0.4903, abs=4 * 0.005)
    assert texts == teacher_texts(EVERY_PROBLEM, generator())


def test_splits_share_no_unordered_pair_and_cover_all() -> None:
    pairs = {split: [frozenset((p.a, p.b)) for p in problems(split, seed=3)] for split in ("train", "gate", "held-out")}
    assert len(pairs["gate"]) == len(pairs["held-out"]) == 512
    assert len(set(pairs["gate"])) == len(set(pairs["held-out"])) == 512
    for one, other in itertools.combinations(pairs.values(), 2):
        assert not set(one) & set(other)
    assert len(set().union(*pairs.values())) == 100 * 101 // 2
    train = problems("train", seed=3)
    assert len(set(train)) == len(train)
    assert {Problem(p.b, p.a) for p in train} == set(train)


def test_no_seed_has_a_harder_split_than_another() -> None:
    """Else the warm-start of some cannot reach the accuracy that it waits for, and that of others ends early."""
    for seed, split in itertools.product((0, 8, 15, 18), ("gate", "held-out")):
        assert teachers_accuracy(problems(split, seed=seed)) == pytest.approx(0.49031875, abs=0.004)


def test_splits_depend_on_the_seed_only() -> None:
    assert problems("held-out", seed=1) == problems("held-out", seed=1)
    assert problems("held-out", seed=1) != problems("held-out", seed=2)
    asked = problems("held-out", seed=1)
    assert any(p.a > p.b for p in asked) and any(p.a < p.b for p in asked)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="'train', 'gate' or 'held-out', got 'test'"):
        problems("test", seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("231", 1.0),
        ("231$", 1.0),
        (" 231\n12+", 1.0),
        ("231 is the answer", 1.0),
        ("132", 0.0),
        ("23", 0.0),
        ("2310", 0.0),
        ("the answer is 231", 0.0),
        ("=231", 0.0),
        ("-231", 0.0),
        ("٢٣١", 0.0),  # digits, but not of the answer's alphabet
        ("", 0.0),
    ],
)
def test_the_verifier_reads_the_first_run_of_digits(text: str, expected: float) -> None:
    assert reward(Problem(47, 85), text) == expected


def test_the_verifier_wants_both_digits_of_a_small_sum() -> None:
    assert reward(Problem(2, 3), "50") == 1.0
    assert reward(Problem(2, 3), "5") == 0.0


def test_accuracy_refuses_a_text_too_few() -> None:
    assert accuracy([Problem(1, 1), Problem(1, 2)], ["20", "20"]) == 0.5
    with pytest.raises(ValueError, match="shorter"):
        accuracy([Problem(1, 1), Problem(1, 2)], ["20"])


def test_draw_takes_different_problems_and_follows_its_generator() -> None:
    train = problems("train", seed=0)
    drawn = draw(train, 32, generator(5))
    assert len(set(drawn)) == 32
    assert drawn == draw(train, 32, generator(5)) != draw(train, 32, generator(6))
    with pytest.raises(InvalidInputError, match="from 1 to the 3 problems there are, got 4"):
        draw(train[:3], 4, generator())


def test_imitation_labels_are_the_answer_and_nothing_else(tokenizer: Any) -> None:
    batch = imitation_batch(problems("train", seed=0), 64, tokenizer, generator())
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert {(tensor.dtype, tuple(tensor.shape)) for tensor in batch.values()} == {(torch.int64, (64, 10))}
    lengths = set()
    for tokens, mask, labels in zip(*(batch[name].tolist() for name in batch), strict=True):
        length = sum(mask)
        lengths.add(length)
        assert mask == [1] * length + [0] * (10 - length)
        assert labels[:6] == [IGNORED] * 6
        assert labels[6:length] == tokens[6:length]
        assert set(labels[length:]) <= {IGNORED}
        text = "".join(CHARACTERS[token] for token in tokens[:length])
        problem = Problem(int(text[:2]), int(text[3:5]))
        carries = itertools.product((True, False), repeat=2)
        assert text in {f"{prompt_text(problem)}{written_answer(problem, carries_kept=kept)}$" for kept in carries}
    assert lengths == {9, 10}


def test_imitation_holds_out_what_is_not_in_its_source(tokenizer: Any) -> None:
    source = problems("gate", seed=0)[:4]
    batch = imitation_batch(source, 4, tokenizer, generator())
    prompts = {tokenizer.decode(row[:6]) for row in batch["input_ids"]}
    assert prompts == {prompt_text(problem) for problem in source}


def test_tokens_of_the_own_tokenizer_are_characters(tokenizer: Any) -> None:
    assert prompt_tokens(Problem(47, 85), tokenizer) == [CHARACTERS.index(c) for c in "47+85="]
    assert answer_tokens("231", tokenizer) == [CHARACTERS.index(c) for c in "231$"]
    assert max_answer_tokens(tokenizer) == 4


@pytest.fixture
def foreign_tokenizer() -> Any:
    """Merges two digits into one token, and begins every text with a special token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", *"0123456789+=", *(f"{n:02d}" for n in range(100))]
    merges = [(a, b) for a in "0123456789" for b in "0123456789"]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Digits()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_a_foreign_tokenizer_gets_its_own_start_end_and_length(foreign_tokenizer: Any) -> None:
    prompt = prompt_tokens(Problem(47, 85), foreign_tokenizer)
    assert foreign_tokenizer.convert_ids_to_tokens(prompt) == ["<s>", "47", "+", "85", "="]
    answer = answer_tokens("231", foreign_tokenizer)
    assert foreign_tokenizer.convert_ids_to_tokens(answer) == ["23", "1", "</s>"]
    assert max_answer_tokens(foreign_tokenizer) == 3
    batch = imitation_batch(problems("train", seed=0), 16, foreign_tokenizer, generator())
    assert batch["input_ids"].shape == (16, 8)
    assert (batch["labels"] == foreign_tokenizer.eos_token_id).sum() == 16


def test_a_tokenizer_without_an_end_of_sequence_is_refused(foreign_tokenizer: Any) -> None:
    foreign_tokenizer.eos_token = None
    with pytest.raises(InvalidInputError, match=r"has no end-of-sequence token.*set eos_token"):
        answer_tokens("231", foreign_tokenizer)
