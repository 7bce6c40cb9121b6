"""The experts that routers select: read, replaced, and checked, for the routers of several models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError, RlcoreError, UnsupportedError
from rlcore.packed.attention import packed_hidden_states
from rlcore.routing.counting import can_count, counting
from rlcore.routing.record import RouteRecorder
from rlcore.routing.replay import check_routes, joined_routes, replaying
from rlcore.routing.routers import NO_ROUTE, ROUTES, routers_of, selecting
from tests.accuracy import assert_as_accurate, assert_same_bits

COMMON = {
    "vocab_size": 21,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": EXPERTS | {"head_dim": 8, "mlp_only_layers": [0], "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 6},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
    "GraniteMoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "DeepseekV3": GROUPS | MLA | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4},
}


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**COMMON | MODELS.get(kind, {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


@pytest.fixture(scope="module")
def qwen() -> Any:
    return model_of("Qwen3Moe")


def ids(*shape: int) -> Tensor:
    return torch.randint(21, shape, generator=torch.Generator().manual_seed(1))


def seen_by_experts(model: Any, run: Any) -> dict[int, tuple[Tensor, Tensor]]:
    """Return indices and weights that the experts of each layer are given while ``run()``."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, given, at=at: seen.update({at: (given[1].detach(), given[2].detach())})
        )
        for at, layer in enumerate(model.model.layers)
        if hasattr(getattr(layer, "mlp", None), "experts")
    ]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def test_own_selection_replayed_changes_no_bit(model: Any) -> None:
    tokens = ids(2, 7)
    with torch.no_grad():
        plain = model(input_ids=tokens).logits
        output, routes = RouteRecorder(model).run(input_ids=tokens)
        with selecting(routers_of(model), lambda router, own: routes[:, router.layer].to(own.dtype)):
            again = model(input_ids=tokens).logits
    assert routes.shape == (14, 3, 2)
    assert routes.dtype == torch.int16
    # the same operations in the same order: gather of top-k's indices gives what top-k gave
    assert_same_bits(output.logits, plain)
    assert_same_bits(again, plain)
    with torch.no_grad():
        assert_same_bits(model(input_ids=tokens).logits, plain, "afterwards routers select by themselves")


def test_other_experts_are_taken_with_the_routers_own_weights_and_gradient(model: Any) -> None:
    routers = routers_of(model)
    assert [router.layer for router in routers] == ([1, 2] if model.config.model_type in DENSE_FIRST else [0, 1, 2])

    def other(router: Any, own: Tensor) -> Tensor:
        first = (own[:, :1] + 1) % router.num_experts
        return torch.cat([first, (first + 2) % router.num_experts], dim=1)

    model.zero_grad()
    with torch.no_grad():
        plain = model(input_ids=ids(1, 9)).logits
    with selecting(routers, other):
        found = model(input_ids=ids(1, 9)).logits
        found.square().sum().backward()
    assert not torch.equal(found.detach(), plain)
    for router in routers:
        gate = next(parameter for name, parameter in router.module.named_parameters() if name.endswith("weight"))
        assert gate.grad is not None, router.name
        assert gate.grad.abs().sum() > 0, router.name


DENSE_FIRST = ("qwen3_moe", "deepseek_v3")


def test_weights_of_replayed_experts_are_the_normalised_probabilities(qwen: Any) -> None:
    fixed = torch.tensor([4, 1]).expand(9, 2)
    logits: dict[int, Tensor] = {}
    routers = routers_of(qwen)
    hooks = [
        router.module.register_forward_hook(lambda _, __, out, at=router.layer: logits.update({at: out[0].detach()}))
        for router in routers
    ]

    def run() -> None:
        with torch.no_grad(), selecting(routers, lambda router, own: fixed):
            qwen(input_ids=ids(1, 9))

    seen = seen_by_experts(qwen, run)
    for hook in hooks:
        hook.remove()
    for layer, (indices, weights) in seen.items():
        assert torch.equal(indices, fixed)
        chosen = logits[layer].double().softmax(-1)[:, [4, 1]]
        exact = chosen / chosen.sum(-1, keepdim=True)
        reference = logits[layer].softmax(-1)[:, [4, 1]]
        assert_as_accurate(weights, exact, reference / reference.sum(-1, keepdim=True))


def test_experts_are_counted_by_what_their_routers_select(model: Any) -> None:
    """The first seven of nine packed tokens count, also where they run as padded rows."""
    routers, tokens, cu_seqlens = routers_of(model), ids(9), torch.tensor([0, 2, 7, 9])
    assert all(can_count(router) for router in routers)
    is_counted = (torch.arange(9) < 7).long()
    for implementation in (None, "padded"):
        counts = torch.zeros(len(routers), 6, dtype=torch.int64)
        with torch.no_grad(), counting(routers, counts, is_counted, cu_seqlens):
            packed_hidden_states(model.model, tokens, cu_seqlens, implementation=implementation)
        expected = torch.zeros_like(counts)
        for start, stop in ((0, 2), (2, 7)):
            with torch.no_grad():
                _, routes = RouteRecorder(model).run(input_ids=tokens[None, start:stop])
            expected += torch.stack([routes[:, one.layer].flatten().bincount(minlength=6) for one in routers])
        assert torch.equal(counts, expected), implementation
    assert not any("forward" in vars(router.experts) for router in routers)


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        pytest.param([[0, 1], [5, 1], [7, -1]], [1, 2, 0, 0, 0, 1], id="LongCat: from 6 on they compute nothing"),
        pytest.param([[0, 1], [5, 1]], [0] * 6, id="a sequence at a time: which tokens is not known"),
        pytest.param([[0, 1]] * 8, [0] * 6, id="padded to a fixed length"),
    ],
)
def test_what_is_no_expert_or_no_token_of_the_batch_is_not_counted(
    qwen: Any, selected: list[list[int]], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, counts = routers_of(qwen)[0], torch.zeros(1, 6, dtype=torch.int64)
    monkeypatch.setattr(router.experts, "forward", lambda *given: given[1])
    with counting([router], counts, torch.ones(3, dtype=torch.int64), torch.tensor([0, 1, 3])):
        router.experts.forward(torch.zeros(len(selected), 32), torch.tensor(selected))
    assert counts[0].tolist() == expected


def test_a_count_waits_for_no_device(qwen: Any) -> None:
    """On the meta device there is nothing to wait for: an ``item()`` or a ``bincount`` raises."""
    is_counted = torch.ones(9, dtype=torch.int64, device="meta")
    routers, counts = routers_of(qwen), torch.zeros(2, 6, dtype=torch.int64, device="meta")
    hidden, selected = torch.zeros(15, 32, device="meta"), torch.zeros(15, 2, dtype=torch.int64, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routers[0].experts, "forward", lambda *given: given[1])
        with counting(routers, counts, is_counted, torch.tensor([0, 2, 7, 9])):
            assert routers[0].experts.forward(hidden, selected) is selected


@pytest.mark.parametrize("implementation", [None, "padded"])
def test_packed_and_padded_rows_have_their_own_routes(qwen: Any, implementation: str | None) -> None:
    lengths = [4, 7, 2]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tokens = ids(13)
    routes = torch.randint(6, (13, 3, 2), generator=torch.Generator().manual_seed(2), dtype=torch.int16)
    routes[:, :, 1] = (routes[:, :, 0] + 1) % 6
    alone = []
    with torch.no_grad():
        for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            with selecting(
                routers_of(qwen), lambda router, own, at=slice(start, stop): routes[at, router.layer].long()
            ):
                alone.append(qwen.model(input_ids=tokens[None, start:stop]).last_hidden_state[0])
        with replaying(routers_of(qwen), routes, cu_seqlens):
            together = packed_hidden_states(qwen.model, tokens, cu_seqlens, implementation=implementation)
        exact_model = model_of("Qwen3Moe", torch.float64)
        exact_model.config._experts_implementation = "eager"  # torch's grouped product takes no float64
        with replaying(routers_of(exact_model), routes, cu_seqlens):
            exact = packed_hidden_states(exact_model.model, tokens, cu_seqlens, implementation="padded")
    assert_as_accurate(together, exact, torch.cat(alone))


def test_tokens_without_a_route_are_routed_by_the_model(qwen: Any) -> None:
    tokens = ids(6)
    with torch.no_grad():
        output, own = RouteRecorder(qwen).run(input_ids=tokens[None])
        with replaying(routers_of(qwen), torch.full_like(own, NO_ROUTE), torch.tensor([0, 6])):
            assert_same_bits(qwen(input_ids=tokens[None]).logits, output.logits)
        with (
            pytest.raises(RlcoreError, match="a router has 6 rows, and the model computes 9 tokens"),
            replaying(routers_of(qwen), own.new_zeros(9, 3, 2), torch.tensor([0, 9])),
        ):
            qwen(input_ids=tokens[None])


def test_a_router_that_does_not_select_by_topk_is_refused(qwen: Any) -> None:
    router = routers_of(qwen)[0]
    with (
        pytest.raises(UnsupportedError, match=r"layers\.1\.mlp.*does not select 2 of 6"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(router.module, "forward", lambda hidden: hidden)
        with selecting([router], lambda _, own: own):
            router.module(torch.zeros(1, 32))
    assert "forward" not in vars(router.module)


def test_a_dense_model_has_no_router() -> None:
    dense = model_of("Qwen2")
    assert routers_of(dense) == []
    with pytest.raises(UnsupportedError, match="Qwen2ForCausalLM is not supported: it has no router"):
        RouteRecorder(dense)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: routes[:, :2], "has 2 layers of 2 experts"),
        (lambda routes: routes[:, :, :1], "has 3 layers of 1 experts"),
        (lambda routes: routes + 6, "layer 1 names expert 7; it has 0 to 5"),
        (lambda routes: routes - 3, "layer 1 names expert -3"),
        (lambda routes: routes * 0, "layer 1 names one expert twice"),
    ],
)
def test_wrong_routes_are_refused(qwen: Any, change: Any, message: str) -> None:
    routes = torch.tensor([0, 1], dtype=torch.int16).expand(5, 3, 2)
    check_routes(qwen, {ROUTES: routes})
    check_routes(qwen, {ROUTES: torch.full_like(routes, NO_ROUTE)})
    with pytest.raises(InvalidInputError, match=message):
        check_routes(qwen, {ROUTES: change(routes)})


def test_joined_routes_end_with_none() -> None:
    one, two = torch.ones(2, 3, 2, dtype=torch.int16), torch.ones(4, 3, 2, dtype=torch.int16)
    assert joined_routes([None, None], (2, 5)) is None
    joined = joined_routes([one, None, two], (3, 5))
    assert joined is not None
    assert (joined != NO_ROUTE).sum((1, 2, 3)).tolist() == [12, 0, 24]
    with pytest.raises(InvalidInputError, match="of different models"):
        joined_routes([one, two[:, :1]], (2, 5))
