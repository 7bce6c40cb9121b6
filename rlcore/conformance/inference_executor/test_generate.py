"""Generated tokens: how many, which ones, how likely each was, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rlcore
from rlcore.conformance.promise import promise
from rlcore.conformance.reference import SamplerTruth, compared
from rlcore.conformance.tiny_model import damaged_copy
from rlcore.conformance.under_test import UnderTest
from rlcore.engines.sampling.completion import VersionSpan
from rlcore.errors import CheckpointError, InvalidInputError

FREE = {"max_tokens": 8, "ignore_eos": True}
"""Completions of just so many tokens."""


def tokens(outputs: Any) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@promise(
    "A prompt has its n completions of max_tokens tokens, by sample index, with all that a Completion has.", "generate"
)
def test_each_prompt_has_its_completions(infer: Any, prompts: Any) -> None:
    outputs = infer.generate(prompts, FREE | {"n": 3, "seed": 1})
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.prompt for output in outputs] == [None] * len(prompts)
    assert [len(output.outputs) for output in outputs] == [3] * len(prompts)
    for completion in (one for output in outputs for one in output.outputs):
        assert len(completion.token_ids) == len(completion.logprobs) == 8
        assert completion.finish_reason == "length"
        assert completion.version_spans == (VersionSpan(infer.version, 0, 8),)
        assert max(completion.logprobs) <= 0
    one = infer.generate(prompts[:1], FREE | {"max_tokens": 1})[0].outputs
    assert [len(completion.token_ids) for completion in one] == [1]


@promise("Texts are read with the folder's tokenizer, and token ids written with it.", "generate")
def test_texts_are_token_ids(infer: Any, folder: Any) -> None:
    from rlcore.engines.sampling.model_folder import check_model_folder, load_tokenizer

    tokenizer = load_tokenizer(check_model_folder(folder))
    if tokenizer is None:
        pytest.skip(f"{folder} has no tokenizer")
    (by_text,) = infer.generate("1+2=", FREE | {"seed": 3})
    assert by_text.prompt == "1+2="
    assert by_text.prompt_token_ids == tokenizer("1+2=")["input_ids"]
    (by_ids,) = infer.generate([by_text.prompt_token_ids], FREE | {"seed": 3})
    (again,), (completion,) = by_ids.outputs, by_text.outputs
    # The log-probs may be rounded otherwise: a prefix cache may have the prompt by now.
    assert (again.token_ids, again.text) == (completion.token_ids, completion.text)
    assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)


@promise("With temperature 0 each token is the likeliest, and its log-prob that of temperature 1.", "generate")
def test_greedy_tokens_are_the_likeliest(infer: Any, prompts: Any, truth: SamplerTruth) -> None:
    outputs = infer.generate(prompts, FREE | {"temperature": 0})
    assert truth.wrong(outputs) == ""
    for output in outputs:
        (completion,) = output.outputs
        for place, token in enumerate(completion.token_ids):
            before = [*output.prompt_token_ids, *completion.token_ids[:place]]
            assert truth.is_likeliest(before, token), "not the likeliest, nor as likely up to rounding"


@promise("The same prompt, seed and sample index give the same tokens, whatever they are batched with.", "generate")
def test_a_seed_decides_the_tokens(infer: Any, prompts: Any) -> None:
    params = FREE | {"n": 2, "seed": 5}
    together = tokens(infer.generate(prompts, params))
    torch.rand(3)  # of the program's own generator, which is not asked
    assert tokens(infer.generate(prompts, params)) == together
    alone = [tokens(infer.generate([prompt], params))[0] for prompt in prompts]
    assert alone == together, "batched with others they are others"
    assert tokens(infer.generate(prompts[::-1], params)) == together[::-1], "in another order they are others"
    assert tokens(infer.generate(prompts, FREE | {"n": 2, "seed": 6})) != together, "another seed gives the same"
    assert all(first != second for first, second in together), "samples of one prompt are the same"


@promise("Without a seed each call draws other tokens, by torch's generator of the program.", "generate")
def test_without_a_seed_tokens_are_drawn_anew(infer: Any, prompts: Any) -> None:
    params = FREE | {"max_tokens": 16}
    assert tokens(infer.generate(prompts, params)) != tokens(infer.generate(prompts, params))


SAMPLING = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.3},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@promise("Log-probs are those of the distribution sampled from: after temperature, top-k and top-p.", "generate")
def test_log_probs_are_the_trainers(
    infer: Any, train: Any, prompts: Any, truth: SamplerTruth, sampling: dict[str, Any]
) -> None:
    outputs = infer.generate(prompts, FREE | {"n": 4, "seed": 2} | sampling)
    assert truth.wrong(outputs, **sampling) == ""
    batch = rlcore.collate(outputs)
    mask = batch["loss_mask"]
    scored = train.forward_logprobs(batch, **sampling)[mask]
    found = batch["old_logprobs"][mask]
    exact = truth_of(truth, outputs, sampling)
    assert compared(found, scored, exact) == "", "forward_logprobs() of a trainer with the same weights is nearer"
    assert found.min() < -0.5, "the comparison is not between zeros"


def truth_of(truth: SamplerTruth, outputs: Any, sampling: dict[str, Any]) -> torch.Tensor:
    return torch.cat(
        [
            truth.chosen(output.prompt_token_ids, completion.token_ids, **sampling)
            for output in outputs
            for completion in output.outputs
        ]
    )


@pytest.mark.parametrize("sampling", [{"temperature": 1.3}, {"temperature": 1.0, "top_k": 4}], ids=str)
@promise("Tokens are drawn as often as their probabilities say.", "generate")
def test_tokens_are_as_frequent_as_they_are_likely(
    infer: Any, prompts: Any, truth: SamplerTruth, sampling: dict[str, Any]
) -> None:
    """By Pearson's test, which a right sampler fails with one seed in ten million; rare tokens count as one."""
    prompt, draws = prompts[1], 400
    (output,) = infer.generate([prompt], {"n": draws, "max_tokens": 1, "seed": 11} | sampling)
    probability_V = truth.next_token(prompt, **sampling).exp()
    counts_V = torch.bincount(torch.tensor(tokens([output])[0]).flatten(), minlength=len(probability_V)).double()
    assert not counts_V[probability_V == 0].any(), "a token outside top-k was drawn"
    is_rare_V = probability_V * draws < 5
    observed, expected = (
        torch.cat([side[~is_rare_V], side[is_rare_V].sum()[None]]) for side in (counts_V, probability_V * draws)
    )
    statistic = float(((observed - expected).square() / expected.clamp(min=1.0)).sum())
    freedom = max(1, len(observed) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 5.2 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty
    assert statistic < limit, f"chi-squared is {statistic:.1f}, at most {limit:.1f} of {freedom} degrees of freedom"


@promise("A stop token ends its completion, is its last token, and is not in its text.", "generate")
def test_stop_tokens_end_a_completion(infer: Any, prompts: Any) -> None:
    params = FREE | {"max_tokens": 12, "seed": 4}
    free = infer.generate(prompts, params)[0].outputs[0].token_ids
    stop = free[5]
    (stopped,) = infer.generate(prompts[:1], params | {"stop_token_ids": (stop,)})[0].outputs
    assert stopped.token_ids == free[: free.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.version_spans == (VersionSpan(infer.version, 0, len(stopped.token_ids)),)


@promise("The model's own end-of-sequence token ends a completion unless ignore_eos says otherwise.", "generate")
def test_the_models_end_ends_a_completion(infer: Any, prompts: Any, folder: Any) -> None:
    from rlcore.engines.sampling.model_folder import check_model_folder

    ends = check_model_folder(folder).stop_token_ids
    if not ends:
        pytest.skip(f"{folder} names no end-of-sequence token")
    params = {"n": 16, "max_tokens": 24, "seed": 8, "temperature": 1.5}
    free = tokens(infer.generate(prompts, params | {"ignore_eos": True}))
    cut = infer.generate(prompts, params)
    for free_n, output in zip(free, cut, strict=True):
        for whole, completion in zip(free_n, output.outputs, strict=True):
            end = next((place for place, token in enumerate(whole) if token in ends), None)
            assert completion.token_ids == (whole if end is None else whole[: end + 1])
            assert completion.finish_reason == ("length" if end is None else "stop")


def bad_prompts(vocab_size: int, max_positions: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    return {
        "an empty prompt": ([], {}),
        "a token id beyond the vocabulary": ([1, vocab_size], {}),
        "a negative token id": ([1, -1], {}),
        "a prompt and max_tokens beyond the model's positions": ([1] * 4, {"max_tokens": max_positions}),
        "a stop token beyond the vocabulary": ([1], {"stop_token_ids": (vocab_size,)}),
    }


@pytest.mark.parametrize("method", ["generate", "submit"])
@promise(
    "A prompt that cannot be run is named in an InvalidInputError, and none of its call is begun.", "check_prompts"
)
def test_bad_prompts_are_refused(infer: Any, prompts: Any, folder: Any, vocab_size: int, method: str) -> None:
    from rlcore.engines.sampling.model_folder import check_model_folder

    expected = tokens(infer.generate(prompts, FREE | {"seed": 1}))
    positions = check_model_folder(folder).config.get("max_position_embeddings", 1 << 20)
    for what, (prompt, params) in bad_prompts(vocab_size, positions).items():
        each = [{"seed": 0}, FREE | params]
        with pytest.raises(InvalidInputError, match=r"prompt 1\b"):
            getattr(infer, method)([[1], prompt], each)
            pytest.fail(f"{what} was accepted")
        assert infer.collect(timeout_s=0) == {}, f"beside {what} another prompt was begun"
    assert tokens(infer.generate(prompts, FREE | {"seed": 1})) == expected


@promise("A folder that is none, or damaged, is refused with a CheckpointError that names it.", "build")
def test_a_damaged_folder_is_refused(under_test: UnderTest, folder: Any, tmp_path: Any) -> None:
    damaged = damaged_copy(folder, tmp_path / "damaged")
    for path in (tmp_path / "absent", damaged):
        with pytest.raises(CheckpointError, match=path.name):
            under_test.inference(path)


@promise("An option of build() that the executor does not know is refused, and its name is said.", "build")
def test_an_unknown_option_is_refused(under_test: UnderTest) -> None:
    with pytest.raises(InvalidInputError, match="no_such_option"):
        under_test.inference(no_such_option=1)
