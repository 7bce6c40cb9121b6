"""A real vLLM returns the experts of each token, which are the trainer's own; and is given float8 weights by a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import rlcore
from rlcore.nn import HuggingFaceTrainModule
from rlcore.parity.policy import probed_class

from .conftest import DEVICE

pytestmark = pytest.mark.vllm
PROMPTS = [[1, 2, 3, 4], [5, 6]]
PARAMS = {"n": 2, "max_tokens": 8, "ignore_eos": True, "seed": 1}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def folder(write_model: Callable[..., Path]) -> Path:
    return write_model("Qwen3MoeConfig", hidden_size=256, head_dim=64, **EXPERTS)


@pytest.fixture
def train(folder: Path) -> Iterator[rlcore.TrainEngine]:
    with rlcore.meta_device():
        module: HuggingFaceTrainModule = probed_class(folder).from_pretrained(folder)
    with rlcore.TrainEngine(module) as engine:
        yield engine


@pytest.mark.gpu
def test_the_experts_of_each_token_are_those_of_the_trainers_routers(
    folder: Path, train: rlcore.TrainEngine, build_vllm: Callable[..., rlcore.InferenceEngine]
) -> None:
    with build_vllm(folder, enable_return_routed_experts=True) as infer:
        outputs = infer.generate(PROMPTS, PARAMS)
        parts = infer.activations(PROMPTS[0])
    assert {"embedding", "layers.0.attention", "layers.0.router", "norm", "head"} <= parts.keys()
    train.build(devices=DEVICE)
    for output in outputs:
        for completion in output.outputs:
            ids = output.prompt_token_ids + completion.token_ids
            routes = completion.routed_experts
            assert routes is not None
            assert len(routes) == len(ids) - 1
            own = train.call("own_routes", ids[:-1], gather="first")
            is_same = (own.sort(-1).values == routes.sort(-1).values).all(-1)
            assert is_same.double().mean() > 0.95, "but for scores that are equal within rounding"


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["fp8_per_tensor", "fp8_per_block"])
def test_float8_weights_are_quantised_on_their_way(
    folder: Path, train: rlcore.TrainEngine, build_vllm: Callable[..., rlcore.InferenceEngine], quantization: str
) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a device that converts float8")
    train.build(devices=DEVICE, dtype="bfloat16")
    first = train.state_dict()
    with build_vllm(folder, dtype="bfloat16", quantization=quantization) as infer:

        def served(factor: float, *, verify: bool) -> list[list[float]]:
            """The logprobs of new weights: by a plan alone, or, verified, as vLLM's own loader has left them."""
            train.load_state_dict({name: factor * tensor for name, tensor in first.items()})
            assert train.sync_weights(infer, verify=verify).fallback_bytes == 0
            return [one.logprobs for output in infer.generate(PROMPTS, PARAMS) for one in output.outputs]

        served(1.5, verify=True)
        by_plan = served(3.0, verify=False)
        served(1.5, verify=True)
        assert by_plan == served(3.0, verify=True), "kernels read the scales that the plan has written"


def test_float8_weights_in_a_hosts_own_order_are_left_to_vllms_loader(
    write_model: Callable[..., Path], build_vllm: Callable[..., rlcore.InferenceEngine]
) -> None:
    if DEVICE != "cpu:0" or not torch.cpu._is_amx_tile_supported():
        pytest.skip("needs a host with AMX, where vLLM's kernels of float8 run")
    folder = write_model("Qwen3Config", hidden_size=256, head_dim=64)
    with rlcore.meta_device():
        module: HuggingFaceTrainModule = probed_class(folder).from_pretrained(folder)
    with (
        build_vllm(folder, dtype="bfloat16", quantization="fp8_per_block") as infer,
        rlcore.TrainEngine(module).build(devices=DEVICE, dtype="bfloat16") as train,
    ):
        before = infer.generate(PROMPTS, PARAMS)
        train.load_state_dict({name: 1.5 * tensor for name, tensor in train.state_dict().items()})
        report = train.sync_weights(infer, route="direct", verify=True)
        linear = sum(tensor.nbytes for name, tensor in train.state_dict().items() if "_proj." in name)
        assert report.fallback_bytes == linear
        after = infer.generate(PROMPTS, PARAMS)
        assert [one.logprobs for one in after[0].outputs] != [one.logprobs for one in before[0].outputs]
