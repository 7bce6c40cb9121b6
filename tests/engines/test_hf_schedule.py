from __future__ import annotations

from rlcore.engines.sampling.hf.schedule import SampleRequest, batches, expand
from rlcore.engines.sampling.params import SamplingParams


def samples_of(lengths: list[int], *, n: int = 1, max_tokens: int = 4) -> list[SampleRequest]:
    prompts = [[request % 7] * length for request, length in enumerate(lengths)]
    return expand(prompts, [SamplingParams(n=n, max_tokens=max_tokens)] * len(lengths), [0] * len(lengths))


def test_every_sample_is_in_exactly_one_batch() -> None:
    samples = samples_of([3, 9, 1, 9, 5, 2], n=3)
    planned = [s for batch in batches(samples, max_num_seqs=4, max_num_tokens=60) for s in batch]
    assert sorted((s.request, s.index) for s in planned) == [(r, i) for r in range(6) for i in range(3)]


def test_batches_keep_both_limits_padding_and_new_tokens_included() -> None:
    for batch in batches(samples_of([3, 9, 1, 9, 5, 2], n=3), max_num_seqs=4, max_num_tokens=30):
        assert len(batch) <= 4
        assert len(batch) * (max(len(s.prompt) for s in batch) + 4) <= 30


def test_longest_prompts_go_first() -> None:
    planned = list(batches(samples_of([3, 9, 1, 9, 5, 2]), max_num_seqs=2, max_num_tokens=1000))
    assert [[len(s.prompt) for s in batch] for batch in planned] == [[9, 9], [5, 3], [2, 1]]


def test_a_sample_over_the_limit_is_a_batch_of_its_own() -> None:
    planned = list(batches(samples_of([100, 3, 3]), max_num_seqs=8, max_num_tokens=20))
    assert [len(batch) for batch in planned] == [1, 2]


def test_equal_prompts_come_together() -> None:
    samples = expand([[1, 2], [3, 4], [1, 2]], [SamplingParams()] * 3, [0, 1, 2])
    (batch,) = batches(samples, max_num_seqs=8, max_num_tokens=1000)
    assert [s.request for s in batch] == [0, 2, 1]


def test_no_samples_make_no_batch() -> None:
    assert list(batches([], max_num_seqs=8, max_num_tokens=100)) == []
