from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.ops import balance, inverse_permutation, pack, position_ids, unpack


def padded_batch(side: str) -> dict[str, Tensor]:
    length = torch.tensor([3, 1, 5, 2])
    column = torch.arange(5)
    mask = column < length[:, None] if side == "right" else column >= 5 - length[:, None]
    return {
        "attention_mask": mask.long(),
        "input_ids": torch.where(mask, torch.arange(20).view(4, 5) + 1, 0),
        "embedding": torch.randn(4, 5, 6) * mask[..., None],
        "reward": torch.randn(4),
        "step": torch.tensor(7),
    }


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpack_is_the_inverse_of_pack(side: Any) -> None:
    batch = padded_batch(side)
    packed = pack(batch)
    assert packed["cu_seqlens"].tolist() == [0, 3, 4, 9, 11] and packed["cu_seqlens"].dtype == torch.int32
    assert packed["input_ids"].shape == (11,) and packed["embedding"].shape == (11, 6)
    again = unpack(packed, side=side)
    assert again.keys() == batch.keys()
    assert all(torch.equal(again[name], values) for name, values in batch.items())


def test_a_batch_of_as_many_tokens_as_sequences_is_told_which_entries_are_of_those() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    batch = {"attention_mask": mask, "values": torch.tensor([[1.0, 2], [3, 0], [0, 0]]), "reward": torch.ones(3)}
    back = unpack(pack(batch), per_sequence=["reward"])
    assert all(torch.equal(back[name], batch[name]) for name in batch)


def test_packed_tokens_keep_their_order() -> None:
    batch = padded_batch("left")
    assert pack(batch)["input_ids"].tolist() == [3, 4, 5, 10, 11, 12, 13, 14, 15, 19, 20]


def test_unpack_pads_to_a_length_with_what_is_asked_for() -> None:
    again = unpack(pack(padded_batch("right")), length=7, fill={"input_ids": -1})
    assert again["input_ids"].shape == (4, 7) and again["input_ids"][1].tolist() == [6] + [-1] * 6
    assert again["embedding"].shape == (4, 7, 6) and again["embedding"][1, 1:].count_nonzero() == 0


def test_packing_carries_gradients() -> None:
    batch = padded_batch("right")
    x = torch.randn(4, 5, requires_grad=True)
    again = unpack(pack(batch | {"x": x}))["x"]
    again.sum().backward()
    assert torch.equal(x.grad, batch["attention_mask"].float())


def test_positions_start_anew_in_each_sequence() -> None:
    edges = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
    assert position_ids(edges).tolist() == [0, 1, 2, 0, 0, 1]


def test_an_empty_batch_round_trips() -> None:
    packed = pack({"attention_mask": torch.zeros(0, 4), "input_ids": torch.zeros(0, 4)})
    assert packed["cu_seqlens"].tolist() == [0]
    assert unpack(packed, length=4)["input_ids"].shape == (0, 4)


def draw_lengths(count: int) -> list[int]:
    generator = random.Random(count)
    return [int(min(4096, generator.lognormvariate(6, 1))) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 7, 256])
def test_micro_batches_hold_every_sequence_once_within_the_limit(count: int) -> None:
    lengths = draw_lengths(count)
    bins = balance(lengths, max_tokens=4096)
    assert sorted(itertools.chain(*bins)) == list(range(count))
    assert max(sum(lengths[index] for index in one) for one in bins) <= 4096
    # First-fit decreasing never needs more than 11/9 of the optimum and 6/9 (Dosa 2007), which is at least the total.
    assert len(bins) <= 11 / 9 * -(-sum(lengths) // 4096) + 6 / 9 or count == 1
    assert balance(torch.tensor(lengths), max_tokens=4096) == bins


def test_long_sequences_are_placed_first() -> None:
    """In the order in which they are given, or the shortest first, they would need three micro-batches."""
    assert balance([4, 4, 6, 6], max_tokens=10) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("num_bins", [1, 3, 8])
def test_a_fixed_number_of_bins_is_filled_evenly(num_bins: int) -> None:
    lengths = draw_lengths(128)
    bins = balance(lengths, num_bins=num_bins)
    assert len(bins) == num_bins and sorted(itertools.chain(*bins)) == list(range(128))
    sums = [sum(lengths[index] for index in one) for one in bins]
    assert max(sums) - min(sums) <= min(lengths)
    assert balance(lengths, num_bins=num_bins) == bins


def test_karmarkar_karp_beats_greedy_on_the_classic_example() -> None:
    bins = balance([8, 7, 6, 5, 4], num_bins=2)
    assert sorted(sum([8, 7, 6, 5, 4][index] for index in one) for one in bins) == [14, 16]


def test_fewer_sequences_than_bins_leave_some_empty() -> None:
    assert sorted(map(len, balance([5, 6], num_bins=4))) == [0, 0, 1, 1]
    assert balance([], num_bins=2) == [[], []] and balance([], max_tokens=5) == []


def test_the_inverse_permutation_restores_the_order() -> None:
    lengths = draw_lengths(50)
    bins = balance(lengths, max_tokens=4096)
    joined = [index for one in bins for index in one]
    assert [joined[place] for place in inverse_permutation(bins)] == list(range(50))


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: pack({"input_ids": torch.zeros(2, 3)}),
            r"pack needs a batch with attention_mask \[N, L\]; got \['inp",
        ),
        (lambda: pack({"attention_mask": torch.zeros(3)}), r"got attention_mask \[3\]"),
        (
            lambda: pack(padded_batch("left") | {"wide": torch.zeros(4, 7)}),
            r"pack: wide must be one entry for each token, \[4, 5\] like attention_mask, one value for each sequence, "
            r"\[4\], or a scalar; got \[4, 7\]",
        ),
        (lambda: pack(padded_batch("left") | {"x": [1.0]}), "pack: x must be a tensor; got list"),  # type: ignore[dict-item]
        (
            lambda: pack({"attention_mask": torch.tensor([[1.0, torch.nan]])}),
            r"pack: attention_mask must be 0 or 1 for each token; got nan at \[0, 1\]",
        ),
        (  # numbers of sequences, which would become one
            lambda: pack({"attention_mask": torch.tensor([[1, 1, 2, 2]])}),
            r"pack: attention_mask must be 0 or 1 for each token; got 2 at \[0, 2\]",
        ),
        (lambda: unpack({"cu_seqlens": [0, 3]}), "unpack: cu_seqlens must be a tensor; got list"),  # type: ignore[dict-item]
        (
            lambda: unpack(pack(padded_batch("left")), fill={"input_id": -1}),
            r"unpack: fill names 'input_id', which is no per-token entry; did you mean one of "
            r"\['embedding', 'input_ids'\]\?",
        ),
        (lambda: unpack(pack(padded_batch("left")), fill={"reward": -1}), "fill names 'reward', which is no per-token"),
        (
            lambda: unpack(pack(padded_batch("left")), fill=-1),  # type: ignore[arg-type]
            "unpack takes a mapping of names to numbers, or None as fill, got -1",
        ),
        (lambda: unpack({"x": torch.zeros(3)}), r"unpack needs a batch with cu_seqlens \[N \+ 1\]; got \['x'\]"),
        (lambda: unpack({"cu_seqlens": torch.tensor([0, 5])}, length=4), "length=4 is below the longest .*, 5 tokens"),
        (
            lambda: unpack({"cu_seqlens": torch.tensor([0, 5])}, side="top"),  # type: ignore[arg-type]
            "side must be 'left' or 'right'; got 'top'",
        ),
        (
            lambda: pack({"attention_mask": torch.ones(1, 2), "cu_seqlens": torch.tensor([0, 2])}),
            "cu_seqlens is what pack makes of attention_mask; the batch must not have it too",
        ),
        (
            lambda: pack({"attention_mask": torch.ones(2, 3), "advantages": torch.ones(6)}),
            r"advantages must be one entry for each token, \[2, 3\].* each sequence, \[2\], or a scalar; got \[6\]",
        ),
        (
            lambda: unpack({"cu_seqlens": torch.tensor([0, 2, 5]), "advantages": torch.ones(6)}),
            r"advantages must begin with the 5 tokens or the 2 sequences; got \[6\]",
        ),
        (
            lambda: unpack({"cu_seqlens": torch.tensor([0, 2, 2]), "reward": torch.ones(2)}),
            r"reward \[2\] may be of the 2 tokens or of as many sequences; name the entries of .* in per_sequence=",
        ),
        (lambda: balance([3, 9, 4], max_tokens=8), "sequence 1 has 9 tokens, more than max_tokens=8; raise"),
        (lambda: balance([3], max_tokens=8, num_bins=1), "needs max_tokens or num_bins, one of them; got"),
        (lambda: balance([3]), "got max_tokens=None, num_bins=None"),
        (lambda: balance([3], num_bins=0), "num_bins must be >= 1; got 0"),
        (
            lambda: unpack({"cu_seqlens": torch.tensor([0, 3, 2])}),
            r"unpack: cu_seqlens must rise from 0; got \[0, 3, 2\]",
        ),
        (lambda: position_ids(torch.tensor([2, 5])), r"position_ids: cu_seqlens must rise from 0; got \[2, 5\]"),
        (
            lambda: position_ids(torch.ones(2)),
            r"position_ids: cu_seqlens must be \[N \+ 1\] integers; got \[2\] torch.fl",
        ),
        (
            lambda: position_ids(torch.tensor([False, True])),
            r"position_ids: cu_seqlens must be \[N \+ 1\] integers; got \[2\] torch.bool",
        ),
        (lambda: balance([-3], num_bins=1), "lengths must be whole numbers >= 0; got -3"),
        (lambda: balance([1, 2.2], max_tokens=3), "lengths must be whole numbers >= 0; got 2.2"),
        (lambda: balance(["a"], num_bins=1), "lengths must be whole numbers >= 0; got 'a'"),  # type: ignore[list-item]
        (lambda: balance(torch.ones(2, 2).long(), num_bins=1), r"lengths must be whole numbers >= 0; got \[1, 1\]"),
        (lambda: inverse_permutation([[0, 0], [1]]), "bins must hold each of 0 to 2 once; 2 is missing"),
        (lambda: inverse_permutation([[0, 5]]), "bins must hold each of 0 to 1 once; 1 is missing"),
    ],
)
def test_bad_input_is_refused(call: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call()


def test_thousands_of_sequences_are_balanced_without_a_search_through_all_bins() -> None:
    generator = random.Random(0)
    lengths = [generator.randrange(1, 8192) for _ in range(4096)]
    started = time.process_time()
    bins = balance(lengths, num_bins=1024)
    assert len(bins) == 1024 and sorted(itertools.chain(*bins)) == list(range(4096))
    assert sorted(itertools.chain(*balance(lengths * 2, max_tokens=8192))) == list(range(8192))
    assert time.process_time() - started < 6, "14 s where each step looked at every bin"
