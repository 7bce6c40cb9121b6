"""The schedule of completions: batches bounded in rows and cached tokens, with little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import MultimodalPrompt, as_key
from rlcore.engines.sampling.seeds import sample_keys


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to be made."""

    request: int
    """Index of its prompt among the prompts of the call."""
    index: int
    """Index among the prompt's n samples."""
    prompt: tuple[int, ...] | MultimodalPrompt
    params: SamplingParams
    key: int
    """Key of its random numbers."""


def expand(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seeds: Sequence[int]
) -> list[SampleRequest]:
    """Return the n samples of every prompt."""
    return [
        SampleRequest(request, index, as_key(prompt), one, key)
        for request, (prompt, one, seed) in enumerate(zip(prompts, params, seeds, strict=True))
        for index, key in enumerate(sample_keys(prompt, seed=seed, n=one.n))
    ]


def batches(
    samples: Sequence[SampleRequest], *, max_num_seqs: int, max_num_tokens: int
) -> Iterator[list[SampleRequest]]:
    """Yield the samples in batches, longest prompts first.

    Samples of equal prompts follow each other, so that a batch prefills each prompt once.

    Args:
        samples: in any order.
        max_num_seqs: most rows in a batch.
        max_num_tokens: most cached tokens in a batch, padding and new tokens included; a sample that needs
            more is a batch of its own.
    """
    batch: list[SampleRequest] = []
    longest_prompt = longest_completion = 0
    for sample in sorted(samples, key=_length_and_prompt):
        prompt = max(longest_prompt, len(sample.prompt))
        completion = max(longest_completion, sample.params.max_tokens)
        rows = len(batch) + 1
        if batch and (rows > max_num_seqs or rows * (prompt + completion) > max_num_tokens):
            yield batch
            batch, prompt, completion = [], len(sample.prompt), sample.params.max_tokens
        batch.append(sample)
        longest_prompt, longest_completion = prompt, completion
    if batch:
        yield batch


def _length_and_prompt(sample: SampleRequest) -> tuple[int, tuple[int, ...], bytes]:
    digest = sample.prompt.digest if isinstance(sample.prompt, MultimodalPrompt) else b""
    return -len(sample.prompt), tuple(sample.prompt), digest
