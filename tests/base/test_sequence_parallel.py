"""Ranks that share a packed row: together they compute what one does. Here they are threads, which exchange lists."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import UnsupportedError
from rlcore.packed.sequence_parallel import SequenceGroup, joined_rows, own_tokens
from tests.accuracy import assert_as_accurate, assert_same_bits

transformers = pytest.importorskip("transformers")

from rlcore.packed import choice as packed_choice  # noqa: E402  # they import transformers
from rlcore.packed import implementations as packed_implementations  # noqa: E402
from rlcore.packed import sequence_parallel  # noqa: E402
from rlcore.packed.attention import explain, packed_hidden_states, share_sequences, why_not_shared  # noqa: E402

from .test_packed_attention import LENGTHS, cu_seqlens_of, in_float64, make, run, tokens_of  # noqa: E402

# Torch 2.10's own, of the fake tensors of a dry run: transformers asks whether groups are aligned.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor is deprecated")


class ThreadGroup(SequenceGroup):
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.name = rank, len(slots), f"{id(slots)} {rank}"
        self._slots, self._barrier = slots, barrier
        sequence_parallel._groups[self.name] = self

    def exchange(self, parts: Tensor) -> Tensor:
        return torch.stack([sent[self.rank] for sent in self._gathered(parts)])

    def add_up(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._gathered(tensor.clone())).sum(0))

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        self._slots[self.rank] = mine
        self._barrier.wait()
        all_ranks = list(self._slots)
        self._barrier.wait()
        return all_ranks


def ranks(number: int) -> list[ThreadGroup]:
    slots: list[Any] = [None] * number
    barrier = threading.Barrier(number, timeout=120)
    return [ThreadGroup(rank, slots, barrier) for rank in range(number)]


def on_each(groups: list[ThreadGroup], work: Callable[[ThreadGroup], Any]) -> list[Any]:
    def run_rank(group: ThreadGroup) -> Any:
        try:
            return work(group)
        except BaseException:
            group._barrier.abort()
            raise

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(run_rank, groups))


def forward_and_backward(decoder: Any, lengths: tuple[int, ...], rows: range) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of these tokens, and the gradients of a loss of them."""
    weight_TH = torch.randn(sum(lengths), 32, generator=torch.Generator().manual_seed(1))
    hidden = run(decoder, lengths)
    used = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    loss = (hidden * weight_TH[rows.start : rows.stop]).sum()
    return hidden.detach(), list(torch.autograd.grad(loss, used, allow_unused=True, materialize_grads=True))


def shared(decoder: Any, num_ranks: int, lengths: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of all ranks one after the other, and the sum of their gradients."""
    groups, decoders = ranks(num_ranks), [copy.deepcopy(decoder) for _ in range(num_ranks)]
    for mine, group in zip(decoders, groups, strict=True):
        share_sequences(mine, group)
        explain(
            mine, torch.device("cpu"), torch.float32
        )  # transformers' default dtype, in a dry run, is of all threads

    def work(group: ThreadGroup) -> tuple[Tensor, list[Tensor]]:
        own = own_tokens(sum(lengths), group.rank, num_ranks)
        return forward_and_backward(decoders[group.rank], lengths, own)

    hidden, gradients = zip(*on_each(groups, work), strict=True)
    return torch.cat(hidden), [sum(each) for each in zip(*gradients, strict=True)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("model_type", "num_ranks", "changes"),
    [
        ("qwen2", 4, {}),
        pytest.param("qwen2", 2, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 4, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 2, {}, marks=pytest.mark.slow),
        pytest.param("gemma2", 2, {}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {"num_attention_heads": 8, "num_key_value_heads": 1}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
@pytest.mark.parametrize("lengths", [LENGTHS, (1, 1)], ids=["uneven", "fewer tokens than ranks"])
def test_ranks_compute_what_one_does(
    model_type: str, num_ranks: int, changes: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """Windows, keys and values dealt out and replicated, sinks, a softcap, experts."""
    decoder = make(model_type, **changes)
    every = range(sum(lengths))
    (alone, expected), (exact, true) = (
        forward_and_backward(model, lengths, every) for model in (decoder, in_float64(decoder))
    )
    hidden, found = shared(decoder, num_ranks, lengths)
    assert_as_accurate(hidden, alone, exact)
    assert_as_accurate(found, expected, true)


@pytest.mark.parametrize("lengths", [(37,), (40,), (37, 30)], ids=str)
def test_ranks_share_long_sequences(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that does not divide among the ranks has padding behind it, which a lone sequence is computed with.

    Several are not, and nothing plans for the length of the padding.
    """
    seen: list[int] = []
    ran_here = (packed_choice.LONG, "per_sequence")
    planned: set[int] = set()
    rounded = packed_implementations._attend_rounded

    def watched(qkv: list[Tensor], longer: int, scaling: float) -> Tensor:
        planned.add(longer)
        return rounded(qkv, longer, scaling)

    attend = packed_choice.IMPLEMENTATIONS[packed_choice.LONG].attend

    def counted(module: Any, query: Tensor, key: Tensor, value: Tensor, packed: Any, **options: Any) -> Tensor:
        if packed.are_long:  # no probe
            seen.append(query.shape[1])
        return attend(module, query, key, value, packed, **options)

    decoder = make("qwen3")
    every = range(sum(lengths))
    (alone, expected), (exact, true) = (
        forward_and_backward(model, lengths, every) for model in (decoder, in_float64(decoder))
    )
    long = packed_choice.Implementation(counted, lambda *_: None)
    monkeypatch.setitem(packed_choice.IMPLEMENTATIONS, packed_choice.LONG, long)
    monkeypatch.setattr(packed_choice, "_runs_by_cudnn", lambda *_: True)
    monkeypatch.setattr(packed_choice, "why_not", lambda name, *_: None if name in ran_here else "no")
    monkeypatch.setattr(packed_implementations, "_attend_rounded", watched)
    monkeypatch.setattr(packed_choice, "_LONG_WORK", 2 * 2 * 16 * 30**2)
    hidden, found = shared(decoder, 2, lengths)
    assert seen == [2] * 4, "half of the heads, on 2 ranks, in 2 layers"
    assert planned == {packed_implementations.rounded(length) for length in lengths}
    assert_as_accurate(hidden, alone, exact)
    assert_as_accurate(found, expected, true)


def test_joined_rows_have_the_gradient_of_their_own_rank() -> None:
    def work(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        rows = (slice(0, 3), slice(3, 3), slice(3, 5))[group.rank]
        own = torch.arange(5.0)[rows].requires_grad_()
        joined = joined_rows(own, rows, 5, group)
        (gradient,) = torch.autograd.grad((joined * torch.arange(5.0, 10.0)).sum(), own)
        return joined, gradient

    results = on_each(ranks(3), work)
    for joined, _ in results:
        assert_same_bits(joined.detach(), torch.arange(5.0))
    assert_same_bits(torch.cat([gradient for _, gradient in results]), torch.arange(5.0, 10.0))


@pytest.mark.parametrize(
    ("model_type", "num_ranks", "changes", "reason"),
    [
        ("qwen2", 3, {}, "its 4 query heads do not divide by 3; take a divisor of them"),
        (
            "llama",
            4,
            {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6},
            "its 6 key and value heads neither divide by 4 nor divide it; take a divisor or a multiple of them",
        ),
        ("mamba", 2, {"state_size": 4}, "MambaModel does not call its attention through transformers' attention int"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    model_type: str, num_ranks: int, changes: dict[str, Any], reason: str
) -> None:
    decoder = make(model_type, **changes)
    before = decoder.config._attn_implementation
    assert (why_not_shared(decoder, num_ranks) or "").startswith(reason)
    assert decoder.config._attn_implementation == before, "asking changes nothing"


def test_padded_rows_are_not_shared() -> None:
    decoder = make("qwen2")
    group, _ = ranks(2)
    share_sequences(decoder, group)
    with pytest.raises(UnsupportedError, match=r"sequence parallelism.*padded rows are not shared among ranks"):
        packed_hidden_states(decoder, tokens_of((3,)), cu_seqlens_of((3,)), implementation="padded")


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
def test_a_compiled_layer_stays_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, packed: Any, **options: Any) -> Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2)

    class Mirror(ThreadGroup):
        def exchange(self, parts: Tensor) -> Tensor:
            return parts.clone()

    possible = packed_choice.Implementation(attend, lambda call, device: None)
    monkeypatch.setitem(packed_choice.IMPLEMENTATIONS, "per_sequence", possible)
    decoder, group = make("llama", num_hidden_layers=1), Mirror(0, [None, None], threading.Barrier(2))
    share_sequences(decoder, group)
    expected = run(decoder)
    torch.compiler.reset()
    counters.clear()
    for layer in decoder.layers:
        layer.compile(backend="eager")
    run(decoder).sum().backward()
    assert not counters["graph_break"]
    assert_as_accurate(run(decoder), expected, expected.double())
    torch.compiler.reset()
