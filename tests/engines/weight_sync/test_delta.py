"""Delta syncs: what changed is told in few bytes, comes out bit for bit, and only where the base is the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import rlcore
from rlcore.engines.weight_sync.channels.peers import LocalPeers
from rlcore.engines.weight_sync.named_source import NamedSourceTensors
from rlcore.engines.weight_sync.options import RoundOptions
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import SyncSession
from rlcore.engines.weight_sync.target import ModuleTarget
from rlcore.engines.weight_sync.transports import sent_buckets
from rlcore.engines.weight_sync.transports.delta import Encoding, apply, encode
from rlcore.errors import InvalidInputError, SyncError

LARGE, SMALL = 40_000, 7
NUM_STEPS = 200
WORDS = [torch.uint8, torch.int16, torch.int32, torch.int64]

# ------------------------------------------------------------------------------------------------- the encodings


def changed(base: Tensor, word: torch.dtype, share: float, seed: int) -> Tensor:
    """Return ``base`` with about this share of its words changed."""
    generator = torch.Generator().manual_seed(seed)
    new = base.clone()
    words = new.view(word)
    words[torch.rand(words.numel(), generator=generator) < share] ^= 1
    return new


@pytest.mark.parametrize("word", WORDS, ids=str)
@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, Encoding.POSITIONS), (0.01, Encoding.POSITIONS), (0.3, Encoding.MASK), (1.0, Encoding.WHOLE)],
)
def test_changes_come_out_bit_for_bit_in_the_shortest_encoding(
    word: torch.dtype, share: float, expected: Encoding
) -> None:
    for seed, num_bytes in enumerate([512, 5 * 512, 200 * 512]):
        base = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        new = changed(base, word, share, seed)
        encoding, count, message = encode(base, new, word)
        assert message.numel() <= num_bytes and message.numel() % 8 == 0
        assert count == int((new.view(word) != base.view(word)).sum())
        if num_bytes > 10_000:
            assert encoding is expected
        whole = base.clone()
        apply(message, int(encoding), count, whole, word)
        assert torch.equal(whole, new)


def test_one_change_in_a_hundred_takes_two_bytes_in_a_hundred() -> None:
    """Each changed word has 2 bytes and 1 for its place; a block of 256 words has 2 more."""
    base = torch.zeros(1 << 20, dtype=torch.uint8)
    encoding, count, message = encode(base, changed(base, torch.int16, 0.01, 0), torch.int16)
    assert encoding is Encoding.POSITIONS
    assert message.numel() <= 3 * count + 2 * (1 << 19) // 256 + 24 < 0.02 * base.numel()


def test_a_message_that_is_none_is_refused() -> None:
    base = torch.zeros(4096, dtype=torch.uint8)
    new = changed(base, torch.int16, 0.02, 0)
    _, count, message = encode(base, new, torch.int16)
    for encoding, number, told, why in [
        (7, count, message, "in encoding 7"),
        (Encoding.POSITIONS, -1, message, "came with -1 changes of 2048 words"),
        (Encoding.POSITIONS, 9999, message, "came with 9999 changes of 2048 words"),
        (Encoding.POSITIONS, count, message[:-8], "changes came in"),
        (Encoding.WHOLE, count, message, "4096 were expected"),
    ]:
        with pytest.raises(SyncError, match=why):
            apply(told, int(encoding), number, base.clone(), torch.int16)
    for value in (-1, 200):
        wrong = message.clone()
        wrong.view(torch.int16)[0] = value
        with pytest.raises(SyncError, match=rf"{count} changes came with the places of "):
            apply(wrong, int(Encoding.POSITIONS), count, base.clone(), torch.int16)
    beyond = torch.tensor([1, 200, 9]).view(torch.uint8)  # one change in the block of 64 words, at place 200
    with pytest.raises(SyncError, match="a change came for a word behind the last of 64"):
        apply(beyond, int(Encoding.POSITIONS), 1, torch.zeros(512, dtype=torch.uint8), torch.int64)
    mask = changed(base, torch.int16, 0.3, 2)
    encoding, count, message = encode(base, mask, torch.int16)
    assert encoding is Encoding.MASK
    message[0] ^= 1
    with pytest.raises(SyncError, match=f"{count} changes came with the places of "):
        apply(message, int(encoding), count, base.clone(), torch.int16)


# ------------------------------------------------------------------------------------------------------ rounds


class Ends:
    """A sender of float32 weights and a receiver of bfloat16 ones, in one thread, through staging buffers."""

    def __init__(self, *, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.given = {
            "large": torch.randn(LARGE, generator=generator),
            "small": torch.randn(SMALL, generator=generator),
            "other": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        }
        self.held = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in self.given.items()}
        self.receiver = rlcore.WeightReceiver(self.held)
        self.sender = rlcore.WeightSender(self.given, self.receiver)

    def step(self, count: int = 100) -> None:
        """Change so many elements of "large", and one of "small"."""
        self.given["large"][random.Random(count).sample(range(LARGE), count)] += 1
        self.given["small"][3] += 1

    def send(self, **options: Any) -> Any:
        return self.sender.send(**{"route": "packed", "delta": True, "staging_bytes": 8192} | options)

    def is_equal(self) -> bool:
        return all(
            torch.equal(self.held[name], tensor.to(self.held[name].dtype)) for name, tensor in self.given.items()
        )

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


NO_BASE = "there is no base yet: the round before was none with delta=True between these, or it failed"


def test_only_what_changed_is_told_after_a_first_round_that_tells_all(ends: Ends) -> None:
    first = ends.send()
    assert (first.is_delta, first.why_dense) == (False, NO_BASE)
    assert first.moved_bytes == 2 * (LARGE + SMALL + 15)
    for options in ({}, {"staged": True}, {"verify": True}, {}):
        ends.step()
        report = ends.send(**options)
        assert (report.is_delta, report.why_dense) == (True, "")
        assert report.moved_bytes < 0.05 * first.moved_bytes
        assert report.needed_bytes > first.moved_bytes - 1
        assert ends.is_equal()
    assert ends.receiver.version == 5
    same = ends.send()
    assert same.is_delta and ends.is_equal()


def test_a_round_without_delta_ends_the_series_and_gives_the_copies_back(ends: Ends) -> None:
    ends.send()
    assert ends.sender._sender._sent._copies
    ends.step()
    plain = ends.send(delta=False)
    assert (plain.is_delta, plain.why_dense) == (False, "")
    assert not ends.sender._sender._sent._copies
    ends.step()
    assert ends.send().why_dense == NO_BASE
    ends.step()
    assert ends.send().is_delta and ends.is_equal()


def test_what_cannot_be_told_as_changes_is_told_whole_and_the_report_says_why(ends: Ends) -> None:
    ends.send()
    ends.step()
    assert ends.send(route="local").why_dense == "'local' copies from the trainer's own tensors, and sends nothing"
    assert not ends.sender._sender._sent._copies
    ends.step()
    assert ends.send().why_dense == NO_BASE, "it has not kept what went the other way"
    ends.step()
    assert "in staging buffers of another size" in ends.send(staging_bytes=4096).why_dense
    ends.step()
    ends.receiver._receiver.reloaded()
    told = ends.send(staging_bytes=4096)
    assert told.why_dense == "the receiver on cpu:0 does not hold version 4 as this trainer sent it"
    ends.step()
    ends.sender._sender._sent.drop()
    assert ends.send(staging_bytes=4096).why_dense == "a trainer rank has not kept what it sent as version 5"
    ends.step()
    assert ends.send(staging_bytes=4096).is_delta and ends.is_equal()
    ends.sender._sender._sent.drop()
    with mock.patch.object(sent_buckets.torch, "empty", side_effect=RuntimeError("out of memory")):
        ends.step()
        told = ends.send(staging_bytes=4096)  # whose staging buffers are there
    assert told.why_dense.startswith("cpu:0 has no memory for a copy of what is sent, ")
    assert ends.is_equal()
    with pytest.raises(InvalidInputError, match="delta must be True or False, got 1"):
        ends.send(delta=1)


def test_a_dtype_that_does_not_give_the_values_back_takes_whole_rounds() -> None:
    made = Ends(dtype=torch.float16)
    made.send()
    made.step()
    assert made.send().why_dense == (
        "the receiver on cpu:0 cannot tell what it was sent: other is float16, and its values travel as bfloat16"
    )
    assert made.is_equal()
    made.close()


def test_a_replica_that_sends_nothing_keeps_no_other_from_telling_changes() -> None:
    given, held = {"weight": torch.randn(1, LARGE)}, nn.Linear(LARGE, 1, bias=False)
    device = rlcore.get_device("cpu")
    source = NamedSourceTensors(lambda: given, 2)
    source.refresh()
    senders, receiver = [Sender(source, device) for _ in range(2)], Receiver(ModuleTarget(held, device))
    session = SyncSession(LocalPeers("the trainer", senders), LocalPeers("the engine", [receiver]))
    reports = [session.run(RoundOptions(version=1, route="packed", is_delta=True), nullcontext) for _ in range(2)]
    assert [report.is_delta for report in reports] == [False, True]
    for end in (receiver, *senders):
        end.close()


def test_another_trainer_between_two_rounds_is_a_gap(ends: Ends) -> None:
    ends.send()
    other = rlcore.WeightSender({name: tensor + 1 for name, tensor in ends.given.items()}, ends.receiver)
    other.send(route="packed", delta=True, staging_bytes=8192)
    assert not ends.is_equal()
    ends.step()
    assert not ends.send().is_delta
    assert ends.is_equal()
    other.close()


# ----------------------------------------------------------------------------------------------------- defects


def test_weights_that_were_written_behind_the_receivers_back_are_another_base(ends: Ends) -> None:
    ends.send()
    ends.held["large"][LARGE // 2] += 1
    ends.step()
    with pytest.raises(
        SyncError, match=r"with what changed since round \d+, its \d+ bytes have another sum: it is dam"
    ):
        ends.send()
    assert not ends.receiver.is_whole
    told = ends.send()
    assert (told.is_delta, told.why_dense) == (False, NO_BASE)
    assert ends.receiver.is_whole and ends.is_equal()


@pytest.mark.parametrize("is_staged", [False, True])
def test_an_update_that_is_lost_is_found(ends: Ends, is_staged: bool) -> None:
    ends.send()
    before = {name: tensor.clone() for name, tensor in ends.held.items()}
    ends.step(1)

    def lossy(base: Tensor, new: Tensor, word: torch.dtype, real: Any = encode) -> Any:
        words = new.clone().view(word)
        places = (words != base.view(word)).nonzero().view(-1)[:1]
        words[places] = base.view(word)[places]
        return real(base, words.view(torch.uint8), word)

    with (
        mock.patch.object(sent_buckets, "encode", lossy),
        pytest.raises(SyncError, match=r"its \d+ bytes have another sum"),
    ):
        ends.send(staged=is_staged)
    assert ends.receiver.is_whole == is_staged
    if is_staged:
        assert all(torch.equal(ends.held[name], tensor) for name, tensor in before.items())
    assert not ends.send().is_delta
    assert ends.is_equal()


def test_changes_since_a_round_that_is_not_here_are_refused(ends: Ends) -> None:
    """A sender that is wrong about what the receiver has."""
    ends.send()
    ends.step()
    ends.receiver._receiver._round.held_round += 1
    with (
        mock.patch("rlcore.engines.weight_sync.session.why_no_base", return_value=""),
        pytest.raises(SyncError, match=r"changes since the weights of round \d+ came to a receiver that does not have"),
    ):
        ends.send()


# -------------------------------------------------------------------------------------------- a model that learns


def model(**sizes: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        **{
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **sizes,
        }
    )
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config)


def learn(trained: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    tokens = torch.randint(0, 512, (4, 24), generator=torch.Generator().manual_seed(step))
    advantages = torch.randn(4, generator=torch.Generator().manual_seed(step))
    loss_B = trained(input_ids=tokens, labels=tokens).loss * advantages.sum()
    loss_B.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
def test_steps_of_adamw_at_a_millionth_take_few_bytes_and_end_bit_for_bit() -> None:
    trained, served = model(), model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-6)
    receiver = rlcore.WeightReceiver(served)
    sender = rlcore.WeightSender(trained.named_parameters, receiver)
    first = sender.send(route="packed", delta=True)
    shares = []
    for step in range(NUM_STEPS):
        learn(trained, optimizer, step)
        report = sender.send(route="packed", delta=True)
        assert report.is_delta
        shares.append(report.moved_bytes / first.moved_bytes)
    assert 0 < max(shares) < 0.15
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in trained.state_dict().items()}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in served.state_dict().items())
    print(f"share of all: mean {sum(shares) / NUM_STEPS:.4f}, most {max(shares):.4f}")
    receiver.close()
    sender.close()
