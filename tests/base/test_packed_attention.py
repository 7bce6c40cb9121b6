"""Packed sequences: nothing leaks, results equal padded ones, memory follows the tokens, and every refusal is told."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.nn import HuggingFaceTrainModule
from rlcore.planned import PlannedDevice, planning_for
from rlcore.registry import OpImplementation, registry
from tests.accuracy import assert_as_accurate, assert_same_bits
from tests.base.flash_4_stand_in import FlashAttention4

transformers = pytest.importorskip("transformers")

from transformers import modeling_flash_attention_utils  # noqa: E402

from rlcore.packed import attention as packed_attention  # noqa: E402  # they import transformers
from rlcore.packed import choice as packed_choice  # noqa: E402
from rlcore.packed import implementations as packed_implementations  # noqa: E402
from rlcore.packed.attention import explain, packed_hidden_states  # noqa: E402
from rlcore.packed.attention_call import AttentionCall  # noqa: E402
from rlcore.packed.choice import Implementation  # noqa: E402

# Torch 2.10's own, of the fake tensors of a dry run: transformers asks whether groups are aligned.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor is deprecated")

WINDOW = 7
VOCAB = 96
LENGTHS = (1, 37, 5, 5, 20, 2)
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # attention that matters: with the usual 0.02 all tokens weigh alike
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ALTERNATING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
PACKED: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": ALTERNATING | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": ALTERNATING | {"query_pre_attn_scalar": 8},
    "phi3": {},
    "granite": {},
    "olmo3": ALTERNATING,
    "cohere2": ALTERNATING,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": ALTERNATING | {"num_local_experts": 4, "num_experts_per_tok": 2},  # with attention sinks
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
"""Model types, by what their config needs besides ``SMALL``."""
EXPERTS = {"mixtral", "qwen3_moe", "gpt_oss"}
"""They multiply groups of tokens, whose sizes change the rounding of other tokens."""

HAS_WINDOWS = "window_size" in inspect.signature(varlen.varlen_attn).parameters
"""Torch's variable-length attention has them since 2.11."""

Decoder = Any
QUICK = ("qwen2", "gemma2", "gpt_oss", "gpt2")
"""Windows, another attention with a softcap, sinks and experts, positions without rotation."""


def on(*model_types: str, quick: tuple[str, ...] = QUICK) -> pytest.MarkDecorator:
    """All but the quick ones are left to `make test-all`."""
    params = [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in model_types]
    return pytest.mark.parametrize("decoder", params, indirect=True)


on_every_model = on(*PACKED)
on_three_models = on("qwen2", "gemma2", "gemma3_text", quick=("gemma2",))


def make(model_type: str, **changes: Any) -> Decoder:
    options = SMALL | PACKED.get(model_type, {}) | changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(model_type, **options)
        if model_type == "gemma2":  # some transformers give it sdpa, which ignores the softcap
            config._attn_implementation = "eager"
        return transformers.AutoModel.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def _compiles_anew(request: pytest.FixtureRequest) -> None:
    """transformers compiles flex attention once for all models of a process, and torch gives up at the ninth graph."""
    if request.node.get_closest_marker("gpu"):
        torch.compiler.reset()


@pytest.fixture
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return make(getattr(request, "param", "qwen2"))


def cu_seqlens_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def tokens_of(lengths: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def by_sequence(rows: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.split(rows, list(lengths))


def run(decoder: Decoder, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> Tensor:
    device = next(decoder.parameters()).device
    tokens = options.pop("tokens", tokens_of(lengths)).to(device)
    return packed_hidden_states(decoder, tokens, cu_seqlens_of(lengths), **options)


def gradients(decoder: Decoder, hidden_TH: Tensor) -> list[Tensor]:
    weight = torch.randn(hidden_TH.shape, generator=torch.Generator().manual_seed(1)).to(hidden_TH.device)
    used = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    weighted = hidden_TH.to(torch.promote_types(hidden_TH.dtype, torch.float32)) * weight
    found = torch.autograd.grad(weighted.sum(), used, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def in_float64(decoder: Decoder) -> Decoder:
    """The same model, but for what transformers computes in float32 in any dtype: angles, norms, weights of experts."""
    wide = copy.deepcopy(decoder).double()
    wide.config._experts_implementation_internal = "eager"  # torch multiplies groups in no float64
    return wide


def assert_as_accurate_as_padded(decoder: Decoder, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> None:
    """The hidden states, beside those of the model in float64."""
    exact = run(in_float64(decoder), lengths, implementation="padded")
    assert_as_accurate(run(decoder, lengths, **options), run(decoder, lengths, implementation="padded"), exact)


def implementation_of(decoder: Decoder, dtype: torch.dtype = torch.float32) -> str:
    return explain(decoder, next(decoder.parameters()).device, dtype).implementation


# ------------------------------------------------------------------------------------------------- equals padded


@on_every_model
def test_packed_equals_padded_and_so_do_gradients(decoder: Decoder) -> None:
    assert implementation_of(decoder) == "per_sequence"
    wide = in_float64(decoder)
    packed, padded, exact = run(decoder), run(decoder, implementation="padded"), run(wide, implementation="padded")
    assert packed.shape == (sum(LENGTHS), 32)
    assert_as_accurate(packed, padded, exact)
    found = gradients(decoder, packed)
    assert len(found) > 10
    assert_as_accurate(found, gradients(decoder, padded), gradients(wide, exact))


@on_three_models
@pytest.mark.parametrize(
    "lengths",
    [
        *(pytest.param(lengths, marks=pytest.mark.slow) for lengths in ((1,), (40,), (1, 1, 1), (6, 7, 8), (9,) * 5)),
        (90, *[1] * 20),
        (1, 90, 1),
    ],
    ids=str,
)
def test_every_sequence_is_as_it_is_alone(decoder: Decoder, lengths: tuple[int, ...]) -> None:
    def one_by_one(model: Decoder) -> Tensor:
        parts = by_sequence(tokens_of(lengths), lengths)
        return torch.cat([model(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in parts])

    assert_as_accurate(run(decoder, lengths), one_by_one(decoder), one_by_one(in_float64(decoder)))


def test_position_ids_start_again_at_each_sequence(decoder: Decoder) -> None:
    seen = []
    decoder.register_forward_pre_hook(lambda *call: seen.append(call[2]["position_ids"]), with_kwargs=True)
    run(decoder, (3, 1, 2))
    assert seen[0].tolist() == [[0, 1, 2, 0, 0, 1]]


@on_three_models
def test_under_autocast(decoder: Decoder) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        packed, padded = run(decoder), run(decoder, implementation="padded")
    assert_as_accurate(packed, padded, run(in_float64(decoder), implementation="padded"))


# --------------------------------------------------------------------------------------------------- no leakage


@on(*(name for name in PACKED if name not in EXPERTS))
def test_changing_one_sequence_changes_no_bit_of_another(decoder: Decoder) -> None:
    tokens = tokens_of(LENGTHS)
    before = by_sequence(run(decoder, tokens=tokens), LENGTHS)
    for changed, cu in enumerate(cu_seqlens_of(LENGTHS)[:-1].tolist()):
        other = tokens.clone()
        other[cu : cu + LENGTHS[changed]] = other[cu : cu + LENGTHS[changed]] % (VOCAB - 1) + 1
        after = by_sequence(run(decoder, tokens=other), LENGTHS)
        same = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
        assert same == [sequence != changed for sequence in range(len(LENGTHS))]


@on_every_model
def test_gradients_do_not_cross(decoder: Decoder) -> None:
    # Each sequence has words of its own, so a word's gradient is that of its sequence.
    lengths = (4, 9, 30)
    tokens = torch.cat([torch.arange(length) % 20 + 1 + 25 * sequence for sequence, length in enumerate(lengths)])
    hidden = by_sequence(run(decoder, lengths, tokens=tokens), lengths)
    for sequence, part in enumerate(hidden):
        (gradient,) = torch.autograd.grad(part.square().sum(), decoder.get_input_embeddings().weight, retain_graph=True)
        touched = gradient.abs().sum(1).nonzero().squeeze(1)
        assert set(touched.tolist()) == set(by_sequence(tokens, lengths)[sequence].tolist())


def test_the_check_for_leakage_can_fail(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def across(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2)

    with monkeypatch.context() as patch:
        patch.setitem(packed_choice.IMPLEMENTATIONS, "per_sequence", Implementation(across, lambda *_: None))
        with pytest.raises(AssertionError):
            test_changing_one_sequence_changes_no_bit_of_another(decoder)
        with pytest.raises(AssertionError):
            test_gradients_do_not_cross(decoder)


# -------------------------------------------------------------------------- with the rest of a model's life


@pytest.mark.parametrize("decoder", ["qwen2", "gemma2"], indirect=True)
def test_plain_calls_of_the_model_stay_as_they_were(decoder: Decoder) -> None:
    tokens = tokens_of((24,)).view(2, 12)
    mask = torch.ones_like(tokens).index_fill(1, torch.tensor([10, 11]), 0)
    before = [decoder(input_ids=tokens, attention_mask=given).last_hidden_state for given in (None, mask)]
    run(decoder)
    after = [decoder(input_ids=tokens, attention_mask=given).last_hidden_state for given in (None, mask)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("name", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
def test_setting_the_attention_anew_keeps_sequences_apart(decoder: Decoder, name: str) -> None:
    run(decoder)
    for _ in range(2):  # then the name is one that an earlier call saw
        decoder.set_attn_implementation(name)
        assert_as_accurate_as_padded(decoder)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_setting_it_while_the_model_runs_fails_and_does_not_leak(decoder: Decoder, name: str) -> None:
    def set_back(module: nn.Module, *_: Any) -> None:
        decoder.config._attn_implementation_internal = name

    decoder.register_forward_pre_hook(set_back)
    with pytest.raises(RuntimeError, match=r"expanded size|size of tensor"):
        run(decoder)


def test_a_saved_config_does_not_name_our_attention(decoder: Decoder, tmp_path: Any) -> None:
    run(decoder)
    decoder.config.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()


def test_the_random_state_is_left_alone(decoder: Decoder) -> None:
    before = torch.get_rng_state()
    run(decoder)
    assert torch.equal(torch.get_rng_state(), before)


@on_three_models
@pytest.mark.parametrize("kind", ["transformers", "reentrant", "torch"])
def test_activation_checkpointing_recomputes_the_same(decoder: Decoder, kind: str) -> None:
    hidden = run(decoder)
    expected = gradients(decoder, hidden)
    if kind == "torch":
        layers = set(decoder.layers)
        apply_activation_checkpointing(decoder, check_fn=lambda module: module in layers)
    else:
        enable = getattr(decoder, "activation_checkpointing_enable", decoder.gradient_checkpointing_enable)
        enable({"use_reentrant": kind == "reentrant"})
        decoder.train()
    again = run(decoder)
    assert_same_bits(hidden, again)  # the same operations
    if kind == "reentrant":  # which knows no torch.autograd.grad
        torch.autograd.backward(again.square().sum())
        assert all(parameter.grad is not None for parameter in decoder.layers.parameters())
        return
    assert all(map(torch.equal, gradients(decoder, again), expected))


def test_the_first_choice_within_a_checkpointed_layer_under_autocast(decoder: Decoder, fake_kernels: None) -> None:
    wide = in_float64(decoder)
    padded, exact = (gradients(model, run(model, implementation="padded")) for model in (decoder, wide))
    layers = set(decoder.layers)
    apply_activation_checkpointing(decoder, check_fn=lambda module: module in layers)
    assert_as_accurate(gradients(decoder, run(decoder)), padded, exact)
    assert implementation_of(decoder) == "flash_attention_2"
    with torch.autocast("cpu", torch.bfloat16):  # another dtype: another choice
        gradients(decoder, run(decoder))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
@pytest.mark.timeout(900)  # the compiler takes minutes where ten others want the processor
@pytest.mark.parametrize(
    ("model_type", "backend", "layer_types"),
    [
        ("gemma2", "eager", ["sliding_attention"]),
        ("qwen2", "aot_eager", ["sliding_attention", "full_attention"]),
    ],
)
def test_compiled_blocks(model_type: str, backend: str, layer_types: list[str]) -> None:
    decoder = make(model_type, num_hidden_layers=len(layer_types), layer_types=layer_types)
    hidden, wide = run(decoder), in_float64(decoder)
    exact = run(wide)
    expected, exact_gradients = gradients(decoder, hidden), gradients(wide, exact)
    for layer in decoder.layers:
        layer.compile(backend=backend)
    compiled = run(decoder)
    assert_as_accurate(compiled, hidden, exact)
    assert_as_accurate(gradients(decoder, compiled), expected, exact_gradients)
    assert_as_accurate_as_padded(decoder, (3, 30, 11))


def test_attention_dropout_is_the_models_own() -> None:
    decoder = make("llama", attention_dropout=0.5)
    refused = dict(explain(decoder, torch.device("cpu"), torch.float32).refused)
    assert refused["varlen_attn"] == "it has no dropout"
    assert torch.equal(run(decoder), run(decoder)), "eval"
    decoder.train()
    assert not torch.equal(run(decoder), run(decoder))


def test_sharded_blocks_choose_once_and_in_their_compute_dtype(
    decoder: Decoder, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        run(decoder)
        exact, rounded = run(in_float64(decoder)), run(copy.deepcopy(decoder).bfloat16())
        asked: list[torch.dtype] = []

        def choose(calls: Any, device: torch.device, dtype: torch.dtype, *args: Any, **options: Any) -> Any:
            asked.append(dtype)
            return packed_choice.choose(calls, device, dtype, *args, **options)

        monkeypatch.setattr(packed_attention, "choose", choose)
        options: Any = {
            "mesh": init_device_mesh("cpu", (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        }
        for layer in decoder.layers:
            fully_shard(layer, **options)
        fully_shard(decoder, **options)
        for _ in range(2):
            hidden = run(decoder)
            torch.autograd.backward(hidden.square().sum())
            assert_as_accurate(hidden, rounded, exact)
        assert asked == [torch.bfloat16]
    finally:
        dist.destroy_process_group()


def test_low_rank_adapters() -> None:
    peft = pytest.importorskip("peft")
    module = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL))
    adapted = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False), module
    )
    assert_as_accurate_as_padded(adapted.get_decoder().eval())


def test_hidden_states_of_a_train_module_run_packed() -> None:
    class Policy(HuggingFaceTrainModule, transformers.Qwen2ForCausalLM):  # type: ignore[name-defined, misc]
        pass

    policy: Any = Policy(transformers.Qwen2Config(**SMALL)).eval()
    rows = []
    policy.model.layers[0].register_forward_pre_hook(lambda _, args: rows.append(args[0].shape))
    hidden = policy.hidden_states({"input_ids": tokens_of(LENGTHS), "cu_seqlens": cu_seqlens_of(LENGTHS)})
    assert rows == [(1, sum(LENGTHS), 32)]
    exact = run(in_float64(policy.model), implementation="padded")
    assert_as_accurate(hidden, run(policy.model, implementation="padded"), exact)


# -------------------------------------------------------------------------------------------------------- memory


def saved_bytes(decoder: Decoder, lengths: tuple[int, ...], **options: Any) -> int:
    """What autograd keeps for the backward, parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor.detach()  # an output that its own graph holds would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = run(decoder, lengths, **options)
    del hidden
    return sum(storage.nbytes() for at, storage in storages.items() if at not in parameters)


@on("llama", "gemma3_text", "mistral", quick=("gemma3_text",))
def test_memory_follows_the_tokens_not_the_longest_sequence(decoder: Decoder) -> None:
    uneven = (256, *[8] * 32)
    even = (64,) * 8
    assert sum(uneven) == sum(even)
    assert saved_bytes(decoder, uneven) < 1.25 * saved_bytes(decoder, even)
    assert saved_bytes(decoder, uneven, implementation="padded") > 10 * saved_bytes(decoder, uneven)


@on("llama", "gemma3_text", "mistral", quick=("mistral",))
def test_memory_of_one_sequence_is_linear(decoder: Decoder) -> None:
    assert saved_bytes(decoder, (1024,)) < 2.1 * saved_bytes(decoder, (512,))


# ------------------------------------------------------------------------------------- what is not run packed


PADDED: dict[str, tuple[dict[str, Any], str]] = {
    "llama4_text": (
        {"attention_chunk_size": 8, "num_local_experts": 2},
        "the mask of Llama4TextAttention has window 8",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "Lfm2Model has a convolution, layers.0.conv.conv"),
    "bloom": ({"n_head": 4, "n_layer": 2}, "BloomModel does not call its attention through transformers'"),
    "gemma3_text": ({"use_bidirectional_attention": True}, "config.use_bidirectional_attention is True"),
}


@pytest.mark.parametrize("model_type", PADDED)
def test_other_models_run_padded_and_say_why(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    changes, reason = PADDED[model_type]
    decoder = make(model_type, **changes)
    with caplog.at_level(logging.WARNING, logger="rlcore.packed.attention"):
        hidden = run(decoder)
        run(decoder)
    assert [record.message for record in caplog.records if reason in record.message] == [
        f"{type(decoder).__name__} runs packed sequences padded: {dict(explain_cpu(decoder).refused)['per_sequence']}"
    ]
    assert explain_cpu(decoder).implementation == "padded"
    assert torch.equal(hidden, run(decoder, implementation="padded"))
    with pytest.raises(UnsupportedError, match="packed attention by 'per_sequence' is not supported: "):
        run(decoder, implementation="per_sequence")


def explain_cpu(decoder: Decoder) -> packed_choice.AttentionChoice:
    return explain(decoder, torch.device("cpu"), torch.float32)


def own_mask(attention: type) -> type:
    class Attention(attention):  # type: ignore[misc]
        def forward(self, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
            return super().forward(*args, attention_mask=attention_mask.clone(), **options)

    return Attention


def own_window(attention: type) -> type:
    class Attention(attention):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.sliding_window = 3

    return Attention


def bidirectional(attention: type) -> type:
    class Attention(attention):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.is_causal = False

    return Attention


def without_options(attention: type) -> type:
    class Attention(attention):  # type: ignore[misc]
        def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **_: Any) -> Any:
            return super().forward(hidden_states, position_embeddings, attention_mask)

    return Attention


def without_attention(attention: type) -> type:
    class Attention(attention):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **_: Any) -> Any:
            return hidden_states.cumsum(1), None

    return Attention


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (own_mask, "Attention attends under a mask of its own"),
        (own_window, "the mask of Attention has window None, its attention 3"),
        (bidirectional, "Attention is not causal"),
        (without_options, "Attention is not handed the keyword arguments of the model"),
        (without_attention, "of its 2 layers these attend, in this order: []"),
    ],
)
def test_an_attention_that_does_more_is_found_out(
    change: Callable[[type], type], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "transformers.models.qwen3.modeling_qwen3"
    attention = change(importlib.import_module(file).Qwen3Attention)
    monkeypatch.setattr(f"{file}.Qwen3Attention", attention)
    choice = explain_cpu(make("qwen3"))
    assert (choice.implementation, choice.refused[0][1]) == ("padded", reason)


def test_a_module_that_is_not_from_transformers_has_no_decoder_to_pack() -> None:
    assert explain_cpu(nn.Linear(1, 1)).refused[0][1] == (
        "its attention is 'None'; packed attention stands in for sdpa and eager"
    )


def test_an_attention_that_was_asked_for_by_name_is_kept(decoder: Decoder) -> None:
    decoder.config._attn_implementation_internal = "flex_attention"
    assert explain_cpu(decoder).refused[0][1].startswith("its attention is 'flex_attention'")


# ------------------------------------------------------------------------------------------------------ choosing


def test_explain_says_why_each_other_one_does_not_run(decoder: Decoder) -> None:
    choice = explain_cpu(decoder)
    reasons = dict(choice.refused)
    assert reasons["flash_attention_2"] == "the package flash-attn is not installed for this device"
    assert reasons["varlen_attn"].startswith(
        "its probe failed: NotImplementedError: Could not run"
        if HAS_WINDOWS
        else f"that of torch {torch.__version__} has"
    )
    assert reasons["flex_attention"].startswith("it is slow unless compiled with triton: ")
    assert str(choice).splitlines()[0] == "per_sequence runs"
    assert f"not varlen_attn: {reasons['varlen_attn']}" in str(choice).splitlines()


def test_an_implementation_asked_for_runs_or_raises(decoder: Decoder) -> None:
    assert torch.equal(run(decoder, implementation="per_sequence"), run(decoder))
    with pytest.raises(
        UnsupportedError, match=r"packed attention in torch.float32 on cpu by 'varlen_attn' is not supp"
    ):
        run(decoder, implementation="varlen_attn")
    with pytest.raises(InvalidInputError, match=r"packed attention has flash_attention_3, .*; got 'fast'"):
        run(decoder, implementation="fast")


def reference(qkv: tuple[Tensor, ...], cu: Tensor, window: tuple[int, int], scale: float) -> Tensor:
    """flash-attn's conventions: [T, heads, D], and token i sees i - left to i + right."""
    query, key, value = qkv
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("ihd,jhd->hij", query, key.repeat_interleave(group, 1)) * scale
    row = torch.arange(len(query))
    sequence = torch.searchsorted(cu[1:], row, right=True)
    left, right = (len(query) if side < 0 else side for side in window)
    apart = row[:, None] - row
    seen = (sequence[:, None] == sequence) & (apart <= left) & (apart >= -right)
    weight = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weight, value.repeat_interleave(group, 1))


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that this machine lacks, by their conventions in plain torch."""
    signature = inspect.signature(modeling_flash_attention_utils._flash_attention_forward)

    def varlen_attn(*args: Any, **options: Any) -> Tensor:
        query, key, value, cu_q, cu_k, max_q, max_k = args
        assert cu_q is cu_k and cu_q.dtype == torch.int32 and max_q == max_k == int(cu_q.diff().max())
        assert options.get("enable_gqa", False) == (query.shape[1] != key.shape[1])
        return reference((query, key, value), cu_q, options["window_size"], options["scale"])

    varlen_attn.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("window_size", "enable_gqa")]
    )

    def flash(*args: Any, **options: Any) -> Tensor:
        given = signature.bind(*args, **options).arguments
        window = given["sliding_window"]
        left = -1 if window is None else window - 1  # as transformers hands it to flash-attn
        parts = tuple(given[f"{name}_states"][0] for name in ("query", "key", "value"))
        return reference(parts, given["cu_seq_lens_q"], (left, 0), given["softmax_scale"])[None]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(packed_implementations, "_GROUPED", {"enable_gqa": True})
    monkeypatch.setattr(packed_implementations, "_flash_attention_forward", flash)
    monkeypatch.setitem(packed_choice._INSTALLED, 2, lambda: True)


@on("qwen2", "gemma3_text", quick=("qwen2",))
@pytest.mark.parametrize("name", ["flash_attention_2", "varlen_attn"])
def test_kernels_are_called_by_their_conventions(decoder: Decoder, name: str, fake_kernels: None) -> None:
    assert implementation_of(decoder) == "flash_attention_2"
    assert_as_accurate_as_padded(decoder, implementation=name)


@pytest.mark.parametrize(("asked", "told"), [(True, True), (False, None)])
def test_flash_attn_is_deterministic_where_torch_is(
    asked: bool, told: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word of it, transformers would take what its environment variable says: mostly the other kernels."""
    seen: list[Any] = []
    monkeypatch.setattr(
        packed_implementations,
        "_flash_attention_forward",
        lambda *_, **options: seen.append(options["deterministic"]),
    )
    packed = packed_implementations.PackedSequences(torch.tensor([0, 3]), (3,), lambda *_: "")
    qkv = torch.zeros(3, 1, 2, 3, 4)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked)
    packed_implementations.attend_flash(2)(None, *qkv, packed, scaling=1.0)
    assert seen == [told]


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
@pytest.mark.slow
def test_variable_length_attention_is_in_the_graph_of_a_compiled_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *_: Any, **options: Any) -> Tensor:
        return reference((query, key, value), cu_seqlens, options["window_size"], options["scale"])

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(packed_choice, "why_not", lambda *_: None)
    decoder = make("qwen2")
    padded, exact = (run(model, implementation="padded") for model in (decoder, in_float64(decoder)))
    torch.compiler.reset()
    for layer in decoder.layers:
        layer.compile(backend="eager", fullgraph=True)
    assert_as_accurate(run(decoder, implementation="varlen_attn"), padded, exact)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch.compile imports it
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@on("qwen2", "gemma2", quick=())
def test_flex_attention_masks_by_sequence_and_window(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_choice, "why_not", lambda name, *_: None)  # on the CPU it has no backward to probe
    # Uncompiled it is plain torch operations.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert_as_accurate_as_padded(decoder, implementation="flex_attention")


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
def test_block_masks_are_those_of_torch(window: int | None) -> None:
    for lengths in ((300,), (128, 256, 128), (1, 0, 700, 5, 62), (40,) * 9, (130, 126, 513)):
        packed = packed_implementations.PackedSequences(cu_seqlens_of(lengths), lengths, lambda *_: "flex_attention")
        packed_implementations.prepare_flex(packed, {window})
        found = packed.block_masks[window]
        expected = create_block_mask(found.mask_mod, None, None, sum(lengths), sum(lengths), "cpu")
        parts, wanted = found.as_tuple(flatten=True)[:-1], expected.as_tuple(flatten=True)[:-1]  # the last is mask_mod
        for part, other in zip(parts, wanted, strict=True):
            if isinstance(part, Tensor) and isinstance(other, Tensor):
                assert torch.equal(part, other)
            else:
                assert part == other
        assert torch.equal(found.to_dense(), expected.to_dense())


CALLS = {
    "plain": AttentionCall(4, 2, 16, 16),
    "window": AttentionCall(4, 2, 16, 16, window=4),
    "softcap": AttentionCall(4, 4, 16, 16, softcap=1.0),
    "sinks": AttentionCall(4, 2, 16, 16, has_sinks=True),
}


@pytest.mark.parametrize(
    ("call", "fault"), [(call, fault) for call, fault in itertools.product(CALLS, CALLS) if call != "plain"]
)
def test_the_probe_finds_an_attention_that_ignores_something(
    call: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"window": "sliding_window", "softcap": "softcap", "sinks": "s_aux"}

    def attend(*args: Any, **options: Any) -> Tensor:
        return packed_choice._definition(*args, **options | ({} if fault == "plain" else {names[fault]: None}))

    monkeypatch.setitem(packed_choice.IMPLEMENTATIONS, "varlen_attn", Implementation(attend, lambda *_: None))
    for dtype in (torch.float32, torch.bfloat16):
        reason = packed_choice.why_not("varlen_attn", CALLS[call], torch.device("cpu"), dtype)
        if call == fault:
            assert reason is not None and reason.startswith("its probe gave a wrong output: relative error ")
        else:
            assert reason is None


def test_the_probe_finds_a_wrong_gradient_of_the_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any, s_aux: Tensor, **options: Any) -> Tensor:
        return packed_choice._definition(*args, s_aux=s_aux.detach() + 2 * (s_aux - s_aux.detach()), **options)

    monkeypatch.setitem(packed_choice.IMPLEMENTATIONS, "varlen_attn", Implementation(attend, lambda *_: None))
    reason = packed_choice.why_not("varlen_attn", CALLS["sinks"], torch.device("cpu"), torch.float32)
    assert reason == "its probe gave a wrong gradient of the sinks: relative error 1.0e+00"


def test_the_probe_finds_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, packed: Any, **_: Any) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    monkeypatch.setitem(packed_choice.IMPLEMENTATIONS, "varlen_attn", Implementation(attend, lambda *_: None))
    reason = packed_choice.why_not("varlen_attn", CALLS["plain"], torch.device("cpu"), torch.float32)
    assert reason is not None and reason.startswith("its probe gave a wrong output")


# ------------------------------------------------------------------------------------------------- long sequences

HEADS_7B = AttentionCall(28, 4, 128, 128)
HEADS_0_5B = AttentionCall(14, 2, 64, 64)


@pytest.mark.parametrize(
    ("call", "num_layers", "runs", "expected"),
    [
        (HEADS_0_5B, 24, [(1, 131_072)], True),
        (HEADS_0_5B, 24, [(1, 16_384)], True),
        (HEADS_0_5B, 24, [(1, 12_288)], False),
        (HEADS_0_5B.of_rank(2), 24, [(1, 16_384)], False),  # half of the heads
        (HEADS_0_5B.of_rank(2), 24, [(1, 131_072)], True),
        (HEADS_0_5B, 24, [(1, 131_072), (1, 32_768)], True),
        (HEADS_0_5B, 24, [(1, 131_072), (1, 64)], False),  # it would plan for the short one too
        (HEADS_7B, 28, [(8, 1024)], False),
        (HEADS_7B, 28, [(8, 8192)], True),
        (HEADS_7B, 28, [(1, 8192)], True),
        (HEADS_7B, 28, [(1, 4096)], False),
        (HEADS_7B, 28, [], False),
    ],
)
def test_which_packs_are_long(
    call: AttentionCall, num_layers: int, runs: list[tuple[int, int]], expected: bool
) -> None:
    assert packed_choice.are_long(frozenset([call]), num_layers, runs) is expected


def test_lengths_of_plans_recur_and_are_hardly_longer() -> None:
    lengths = range(1, 5000)
    found = [packed_implementations.rounded(length) for length in lengths]
    assert all(length <= longer < length * 17 / 16 for length, longer in zip(lengths, found, strict=True))
    assert len({longer for longer in found if 1024 < longer <= 2048}) == 16


LONG = packed_choice.LONG
SHORTEST_LONG = 20
ALONE, APART, SHORT = (37,), (37, 21, 21), (37, 5)
"""A pack of one long sequence, one of several, and one that is not of long ones alone."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementations that run. On this machine, too, long sequences have one of their own."""
    calls: list[str] = []
    for name in (LONG, "per_sequence"):
        plain = packed_choice.IMPLEMENTATIONS[name].attend

        def attend(*args: Any, name: str = name, plain: Callable[..., Tensor] = plain, **options: Any) -> Tensor:
            calls.append(name)
            return plain(*args, **options)

        monkeypatch.setitem(packed_choice.IMPLEMENTATIONS, name, Implementation(attend, lambda *_: None))
    monkeypatch.setattr(packed_choice, "_runs_by_cudnn", lambda *_: True)
    monkeypatch.setattr(packed_choice, "_LONG_WORK", 2 * 2 * 32 * SHORTEST_LONG**2)
    return calls


@pytest.mark.parametrize(("lengths", "name"), [(ALONE, LONG), (APART, LONG), (SHORT, "per_sequence")], ids=str)
def test_long_sequences_are_attended_as_others(lengths: tuple[int, ...], name: str, ran: list[str]) -> None:
    decoder = make("qwen3")
    wide = in_float64(decoder)
    padded, exact = (run(model, lengths, implementation="padded") for model in (decoder, wide))
    run(decoder, lengths)  # the first probes
    run(decoder, (5, 6))  # a choice for one pack is none for the next
    ran.clear()
    hidden = run(decoder, lengths)
    assert ran == [name] * 2
    assert_as_accurate(hidden, padded, exact)
    assert_as_accurate(gradients(decoder, hidden), gradients(decoder, padded), gradients(wide, exact))


@pytest.mark.parametrize("lengths", [ALONE, APART], ids=str)
def test_a_recomputation_of_long_sequences_is_the_same(lengths: tuple[int, ...], ran: list[str]) -> None:
    decoder = make("qwen3")
    expected = gradients(decoder, run(decoder, lengths))
    layers = set(decoder.layers)
    apply_activation_checkpointing(decoder, check_fn=lambda module: module in layers)
    ran.clear()
    hidden = run(decoder, lengths)
    run(decoder, (3, 4))  # another pack before the backward
    assert all(map(torch.equal, gradients(decoder, hidden), expected))
    assert ran == [LONG] * 2 + ["per_sequence"] * 2 + [LONG] * 2


def test_an_implementation_asked_for_runs_long_sequences_too(ran: list[str]) -> None:
    decoder = make("qwen3")
    run(decoder, ALONE, implementation="per_sequence")
    assert ran == ["per_sequence"] * 2


@pytest.mark.parametrize("order", [(SHORT, ALONE), (ALONE, SHORT)], ids=["short first", "long first"])
def test_each_implementation_is_tried_once_for_long_packs_and_others(
    order: tuple[tuple[int, ...], ...], ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def probe(name: str, *_: Any) -> str:
        tried.append(name)
        return "no"

    monkeypatch.setattr(packed_choice, "_probe", probe)
    monkeypatch.setitem(packed_choice.IMPLEMENTATIONS, "flex_attention", Implementation(probe, lambda *_: None))
    decoder = make("qwen3")
    for lengths in order * 2:
        run(decoder, lengths)
    assert ran == ["per_sequence"] * 8
    assert sorted(tried) == ["flex_attention", LONG, *(["varlen_attn"] if HAS_WINDOWS else [])]
    explain_cpu(decoder)
    assert len(tried) == 2 + HAS_WINDOWS


def test_other_attention_of_long_sequences_is_refused() -> None:
    lacks = packed_choice.IMPLEMENTATIONS[LONG].lacks
    assert {name: lacks(call, torch.device("cpu")) for name, call in CALLS.items()} == {
        "plain": None,
        "window": "it has no window",
        "softcap": "it has no softcap",
        "sinks": "it has no sinks",
    }
    found = packed_choice.choose(frozenset([CALLS["plain"]]), torch.device("cpu"), torch.float32, of_long=True)
    assert (found.implementation, dict(found.refused)[LONG]) == (
        "per_sequence",
        "torch takes another kernel than cuDNN's for it in torch.float32",
    )


def test_explain_tells_of_long_sequences(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, cpu = make("qwen3"), torch.device("cpu")
    monkeypatch.setattr(packed_choice, "_LONG_WORK", 1e13)
    assert dict(explain_cpu(decoder).refused)[LONG] == (
        "it runs only packs in which every run of equal lengths has at least 1e+13 multiplications and additions; "
        "ask with of_long=True"
    )
    assert explain(decoder, cpu, torch.float32, of_long=True).implementation == LONG
    monkeypatch.setattr(packed_choice, "_runs_by_cudnn", lambda *_: False)
    choice = explain(make("qwen3"), cpu, torch.float32, of_long=True)
    assert (choice.implementation, dict(choice.refused)[LONG]) == (
        "per_sequence",
        "torch takes another kernel than cuDNN's for it in torch.float32",
    )


def test_an_installed_flash_attn_2_runs_packs_that_are_not_long(
    ran: list[str], fake_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, cpu = make("qwen3"), torch.device("cpu")
    run(decoder, ALONE)
    assert ran[-2:] == [LONG] * 2
    ran.clear()
    run(decoder, SHORT)
    assert ran == [] and implementation_of(decoder) == "flash_attention_2"
    monkeypatch.setitem(packed_choice._INSTALLED, 3, lambda: True)
    assert explain(make("qwen3"), cpu, torch.float32, of_long=True).implementation == "flash_attention_3"


def test_a_plan_counts_long_sequences_as_any() -> None:
    with planning_for(PlannedDevice("cuda", cores=132, arch=90)):
        choice = packed_choice.choose(frozenset([CALLS["plain"]]), torch.device("meta"), torch.bfloat16, of_long=True)
    assert choice.implementation == "varlen_attn"
    assert dict(choice.refused)[LONG] == "it is not planned with on cuda"


@pytest.mark.parametrize("defect", ["not causal", "cut off", "unscaled", "one batch"])
def test_the_probe_finds_a_defect_of_long_sequences(
    defect: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = nn.functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if defect == "cut off":
            key = torch.cat([key[:, :, :-1], torch.zeros_like(key[:, :, -1:])], 2)
        if defect == "one batch":
            key = key[:1].expand_as(key)
        changes: dict[str, dict[str, Any]] = {"not causal": {"is_causal": False}, "unscaled": {"scale": 1.0}}
        return plain(query, key, value, **options | changes.get(defect, {}))

    assert packed_choice.why_not(LONG, CALLS["plain"], torch.device("cpu"), torch.float64) is None
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attend)
    reason = packed_choice.why_not(LONG, CALLS["plain"], torch.device("cpu"), torch.float32)
    assert reason is not None and reason.startswith("its probe gave a wrong ")


def test_the_probe_finds_a_defect_of_a_lone_sequence(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = packed_choice.IMPLEMENTATIONS[LONG].attend

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, packed: Any, **options: Any) -> Tensor:
        return plain(module, query, key, value, packed, **options | ({"scaling": 1.0} if packed.is_lone else {}))

    monkeypatch.setitem(packed_choice.IMPLEMENTATIONS, LONG, Implementation(attend, lambda *_: None))
    reason = packed_choice.why_not(LONG, CALLS["plain"], torch.device("cpu"), torch.float32)
    assert reason is not None and reason.startswith("its probe gave a wrong output")


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
@pytest.mark.parametrize("is_refused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_blocks_have_one_more_graph_for_a_lone_long_sequence(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several long ones would break the graph: compiled blocks run them as any pack, and all where one is refused."""

    def varlen_attn(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *_: Any, **options: Any) -> Tensor:
        return reference((query, key, value), cu_seqlens, options["window_size"], options["scale"])

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    refused = ("flash", LONG) if is_refused else ("flash",)
    monkeypatch.setattr(packed_choice, "why_not", lambda name, *_: name if name.startswith(refused) else None)
    monkeypatch.setattr(packed_choice, "_LONG_WORK", 2 * 2 * 32 * SHORTEST_LONG**2)
    decoder = make("qwen3")
    plain, wide = copy.deepcopy(decoder), in_float64(decoder)
    are_of_lone: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        are_of_lone.append("scaled_dot_product_attention" in graph.code)
        return graph

    torch.compiler.reset()
    for layer in decoder.layers:
        layer.compile(backend=backend, fullgraph=True)
    for lengths in [(5, 9), (4, 7, 8), APART, (37, 22, 26), (40,), (37,), (25,), (61,), (44, 23), (7, 3, 2), (32,)]:
        padded, exact = (run(model, lengths, implementation="padded") for model in (plain, wide))
        assert_as_accurate(run(decoder, lengths), padded, exact)
    torch.compiler.reset()
    assert are_of_lone == [False, False] + [True, True] * (not is_refused)  # each for one length, and then for any


# --------------------------------------------------------------------------------------------------- on the GPU

on_gpu = pytest.mark.parametrize(
    ("name", "model_type", "dtype"),
    [
        ("varlen_attn", "qwen2", torch.bfloat16),
        ("varlen_attn", "gemma3_text", torch.float16),
        ("flex_attention", "llama", torch.float32),
        ("flex_attention", "gemma2", torch.bfloat16),
        ("flex_attention", "gpt_oss", torch.bfloat16),
        ("per_sequence", "gemma2", torch.bfloat16),
        ("flash_attention_4", "qwen2", torch.bfloat16),
        ("flash_attention_4", "gemma2", torch.float16),
        ("flash_attention_4", "gpt_oss", torch.bfloat16),
    ],
)
GPU_SIZES = {"head_dim": 64, "hidden_size": 128, "query_pre_attn_scalar": 64, "initializer_range": 0.1}


NO_ROUTING = {"num_experts_per_tok": 4}
"""Of 4: where rounding chooses another expert for a token, it is off by 0.4 in any attention."""


def assert_as_exact_as_padded(
    name: str, model_type: str, dtype: torch.dtype, device: str, lengths: tuple[int, ...]
) -> None:
    """A float32 product of flex attention may be in TF32, which has the digits of float16: so is its reference."""
    sizes = GPU_SIZES if model_type.startswith("gemma") else GPU_SIZES | {"query_pre_attn_scalar": None}
    decoder = make(model_type, **sizes | (NO_ROUTING if model_type == "gpt_oss" else {})).to(device, dtype)
    reference = copy.deepcopy(decoder).to(torch.float16 if dtype == torch.float32 else dtype)

    def results(model: Decoder, implementation: str) -> tuple[Tensor, list[Tensor]]:
        hidden_TH = run(model, lengths, implementation=implementation)
        return hidden_TH, gradients(model, hidden_TH)

    packed = results(decoder, name)
    assert len(packed[1]) > 15  # gradients
    for sides in zip(packed, results(reference, "padded"), results(in_float64(decoder), "padded"), strict=True):
        assert_as_accurate(*sides)


@pytest.mark.parametrize("model_type", ["gpt_oss", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_in_bfloat16_it_is_as_exact_as_padded(model_type: str) -> None:
    assert_as_exact_as_padded("per_sequence", model_type, torch.bfloat16, "cpu", LENGTHS)


@pytest.mark.parametrize(
    "model_type", ["gpt_oss", *(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen2", "gemma2"))]
)
def test_an_installed_flash_attn_4_runs_all_packs(model_type: str, flash_attn_4: FlashAttention4) -> None:
    assert implementation_of(make(model_type)) == "flash_attention_4"
    assert_as_exact_as_padded("flash_attention_4", model_type, torch.bfloat16, "cpu", LENGTHS)


def test_the_check_for_exactness_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any, scaling: float, sliding_window: int | None = None, **_: Any) -> Tensor:
        return packed_choice._definition(
            *args, scaling=scaling, sliding_window=sliding_window, softcap=None, s_aux=None
        )  # without sinks

    monkeypatch.setitem(packed_choice.IMPLEMENTATIONS, "per_sequence", Implementation(attend, lambda *_: None))
    with pytest.raises(AssertionError):
        assert_as_exact_as_padded("per_sequence", "gpt_oss", torch.bfloat16, "cpu", LENGTHS)


@pytest.mark.gpu
@on_gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_on_the_gpu(name: str, model_type: str, dtype: torch.dtype) -> None:
    if name == "varlen_attn" and not HAS_WINDOWS:
        pytest.skip(f"the variable-length attention of torch {torch.__version__} has no sliding windows")
    if name == "flash_attention_4" and not packed_choice._INSTALLED[4]():
        pytest.skip("flash-attn-4 is not installed")
    assert_as_exact_as_padded(name, model_type, dtype, "cuda", (1, 300, 17, 17, 129))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.skipif(not packed_choice._INSTALLED[4](), reason="flash-attn-4 is not installed")
def test_flash_attn_4_has_other_kernels_for_many_sequences_on_the_gpu() -> None:
    """More than 256 of them; and the deterministic ones, which wait for each other, end and repeat their bits."""
    assert_as_exact_as_padded("flash_attention_4", "qwen2", torch.bfloat16, "cuda", (3, 1) * 150)
    decoder = make("qwen2", **GPU_SIZES | {"query_pre_attn_scalar": None}).to("cuda", torch.bfloat16)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        both = [gradients(decoder, run(decoder, (700, 20, 300), implementation="flash_attention_4")) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(*both, strict=True):
        assert_same_bits(one, other)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_leaks_on_the_gpu(dtype: torch.dtype) -> None:
    decoder = make("llama", head_dim=64).to("cuda", dtype)
    expected = "varlen_attn" if dtype == torch.bfloat16 and HAS_WINDOWS else "flex_attention"
    assert implementation_of(decoder, dtype) in (
        "flash_attention_3",
        "flash_attention_4",
        "flash_attention_2",
        expected,
    )
    test_changing_one_sequence_changes_no_bit_of_another(decoder)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_on_the_gpu() -> None:
    decoder = make("llama", head_dim=64).to("cuda", torch.bfloat16)
    plain, wide = copy.deepcopy(decoder), in_float64(decoder)
    run(decoder)  # chooses before anything is compiled
    for layer in decoder.layers:
        layer.compile()
    for lengths in (LENGTHS, (30, 4), (100, 1, 60)):
        reference = run(plain, lengths, implementation="padded")
        assert_as_accurate(run(decoder, lengths), reference, run(wide, lengths, implementation="padded"))


@pytest.mark.gpu
def test_autocast_on_the_gpu() -> None:
    decoder = make("llama", head_dim=64).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        packed, padded = run(decoder), run(decoder, implementation="padded")
    assert_as_accurate(packed, padded, run(in_float64(decoder), implementation="padded"))


@pytest.fixture
def long_llama(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A model whose sequences of 512 tokens are long, where torch prefers cuDNN's kernels."""
    if not packed_choice._runs_by_cudnn(AttentionCall(4, 2, 64, 64), torch.device("cuda"), torch.bfloat16):
        pytest.skip("torch prefers another kernel than cuDNN's here")
    monkeypatch.setattr(packed_choice, "_LONG_WORK", 2 * 2 * 4 * 64 * 512**2)
    for version in packed_choice._INSTALLED:  # which would run them or others
        monkeypatch.setitem(packed_choice._INSTALLED, version, lambda: False)
    return make("llama", head_dim=64, hidden_size=128, initializer_range=0.1).to("cuda", torch.bfloat16)


def kernels_of(work: Callable[[], Any]) -> set[str]:
    """The operators of attention that run."""
    with torch.profiler.profile(acc_events=True) as profile:
        work()
    return {event.key for event in profile.key_averages() if "attn" in event.key or "attention" in event.key}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("lengths", [(2048,), (1531,), (512,) * 4, (1024, 700, 700)], ids=str)
def test_cudnn_runs_long_sequences_as_exactly_as_flash_attention(lengths: tuple[int, ...], long_llama: Decoder) -> None:
    wide = in_float64(long_llama)

    def results(model: Decoder, name: str | None) -> tuple[Tensor, list[Tensor]]:
        hidden_TH = run(model, lengths, implementation=name)
        return hidden_TH, gradients(model, hidden_TH)

    results(long_llama, None)  # the first probes
    seen = kernels_of(lambda: results(long_llama, None))
    assert any("cudnn_attention_backward" in name for name in seen), seen
    assert not any("varlen" in name for name in seen), seen
    exact = results(wide, "padded")
    for sides in zip(results(long_llama, None), results(long_llama, "varlen_attn"), exact, strict=True):
        assert_as_accurate(*sides)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_long_sequences_with_cudnn_turned_off_run_as_others(long_llama: Decoder) -> None:
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]):
        seen = kernels_of(lambda: run(long_llama, (1024,)))
    assert not any("cudnn" in name for name in seen), seen


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_run_a_lone_long_sequence_by_cudnn(long_llama: Decoder) -> None:
    plain, wide = copy.deepcopy(long_llama), in_float64(long_llama)
    torch.compiler.reset()
    for layer in long_llama.layers:
        layer.compile(fullgraph=True)
    for lengths in ((1024,), (30, 20), (1531,), (900, 800), (700,)):
        reference, exact = (run(model, lengths, implementation="padded") for model in (plain, wide))
        seen = kernels_of(lambda lengths=lengths: run(long_llama, lengths))
        assert any("cudnn" in name for name in seen) == (len(lengths) == 1), seen
        found = run(long_llama, lengths)
        assert_as_accurate(found, reference, exact)
        packed = gradients(long_llama, found)
        assert_as_accurate(packed, gradients(plain, reference), gradients(wide, exact))


def refuses_windows(call: AttentionCall, device: torch.device) -> str | None:
    return "it has no windows" if call.window else None


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plugin's, for the cpu, by two names: right, and wrong by a missing scale."""
    at = "rlcore.packed.choice:_definition", f"{__name__}:unscaled"
    entries = [
        OpImplementation(packed_choice.OPERATOR, "cpu", name, priority, path, f"{__name__}:refuses_windows", "mine")
        for name, priority, path in (("right", 1, at[0]), ("wrong", 2, at[1]))
    ]
    monkeypatch.setitem(registry().ops, packed_choice.OPERATOR, entries)
    packed_choice._offered.cache_clear()
    yield
    packed_choice._offered.cache_clear()


def unscaled(*args: Any, **options: Any) -> Tensor:
    return packed_choice._definition(*args, **options | {"scaling": 1.0})


@pytest.mark.usefixtures("_registered")
def test_what_a_plugin_registers_for_a_device_comes_first_and_is_tried() -> None:
    call, cpu = CALLS["plain"], torch.device("cpu")
    assert list(packed_choice.implementations("cpu"))[:3] == ["wrong", "right", "flash_attention_3"]
    assert "right" not in packed_choice.implementations("cuda")
    found = packed_choice.choose(frozenset([call]), cpu, torch.float32)
    assert found.implementation == "right"
    (refused,) = found.refused
    assert refused[0] == "wrong" and "its probe gave a wrong output: relative error" in refused[1]
    assert packed_choice.why_not("right", call._replace(window=8), cpu, torch.float32) == "it has no windows"
    with pytest.raises(InvalidInputError, match="packed attention has wrong, right, flash_attention_3"):
        packed_choice.choose(frozenset([call]), cpu, torch.float32, "mine")
