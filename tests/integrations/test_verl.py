"""rlcore's adapters behind verl's own interfaces, of the verl that is installed; the CPU stands for its device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlcore.errors import InvalidInputError, StateError
from rlcore.ops import linear_logprob
from tests.accuracy import assert_as_accurate, assert_same_bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None, reason="verl is not installed: pip install 'verl>=0.9.1'"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
LETTERS = SimpleNamespace(N=3, L=11, H=32, V=50)


# ------------------------------------------------------------------------------------------------------- plugin


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, **environment}, cwd=ROOT,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_verl_loads_the_plugin_by_itself_and_takes_the_device_that_is_named() -> None:
    found = in_a_process(
        "import verl\n"
        "from verl.utils import device\n"
        "from verl.utils.experimental.torch_functional import FusedLinearForPPO\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "print(device.get_device_name(), device.get_vendor(), device.get_nccl_backend(), FusedLinearForPPO.__name__)\n"
        "print(EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__)\n"
        "print(EngineRegistry.get_engine_cls('value_model', 'fsdp2').__name__)\n"
        "print(EngineRegistry.get_engine_cls('language_model', 'fsdp').__name__)\n",
        VERL_PLATFORM="rlcore", RLCORE_DEVICE="cpu", VERL_ENGINE_VENDOR="rlcore", VERL_ENGINE_DEVICE="cuda",
    )  # fmt: skip
    assert found.stdout.splitlines() == [
        "cpu host gloo LinearLogprobForPPO",
        "ArenaEngineWithLMHead",
        "ArenaEngineWithValueHead",
        "FSDPEngineWithLMHead",
    ], found.stderr


def test_without_its_variables_verl_keeps_its_platform_and_engines() -> None:
    found = in_a_process(
        "import sys, verl\n"
        "print(sorted(name for name in sys.modules if name.startswith('rlcore.integrations.verl.')))\n"
        "from verl.utils import device\n"
        "print(device.get_device_name(), device.get_vendor())\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "import verl.workers.engine.fsdp\n"
        "print(EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__)\n",
    )
    assert found.stdout.splitlines() == [
        "['rlcore.integrations.verl.kernel', 'rlcore.integrations.verl.platform', 'rlcore.integrations.verl.plugin']",
        "cuda nvidia",
        "FSDPEngineWithLMHead",
    ], found.stderr


def test_a_plugin_that_fails_says_so_although_verl_goes_on() -> None:
    code = "import sys; sys.modules['rlcore.integrations.verl.kernel'] = None\nimport verl\nprint(verl.__version__)"
    found = in_a_process(code)
    assert found.returncode == 0
    assert "verl runs without rlcore, whose plugin failed:" in found.stderr


# ------------------------------------------------------------------------------------------------------- platform


def test_the_platform_answers_what_verl_asks_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcore.integrations.verl.platform import RlcorePlatform

    monkeypatch.setenv("RLCORE_DEVICE", "cpu")
    platform = RlcorePlatform()  # abstract methods that verl adds would fail here
    assert platform.device_module is torch.cpu
    assert platform.is_available()
    assert not platform.is_platform_available(use_smi_check=True), "every machine has a CPU"
    assert platform.current_device() == 0
    assert platform.device_count() >= 1
    platform.set_device(0)
    platform.synchronize()
    platform.empty_cache()
    platform.manual_seed(5)
    first = torch.rand(3)
    platform.manual_seed_all(5)
    assert_same_bits(torch.rand(3), first, "one seed")
    assert platform.get_device_capability() == (None, None)
    assert platform.visible_devices_envvar() == ""
    assert platform.ray_noset_envvars() == []
    assert platform.ray_resource_options(2) == {"num_cpus": 2}
    assert platform.is_ipc_supported()
    assert platform.cudart() is None
    with torch.profiler.profile() as trace, platform.nvtx_range("a range of verl"):
        platform.profiler_start()
        platform.profiler_stop()
    assert "a range of verl" in {event.key for event in trace.key_averages()}


def test_a_process_without_the_device_knows_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcore.integrations.verl.platform import RlcorePlatform

    platform = RlcorePlatform()
    monkeypatch.setenv("RLCORE_DEVICE", "musa:1")
    assert (platform.device_name, platform.vendor_name) == ("musa", "moore threads")
    assert platform.communication_backend_name() == "mccl"
    assert platform.visible_devices_envvar() == "MUSA_VISIBLE_DEVICES"
    assert platform.ray_noset_envvars() == ["RAY_EXPERIMENTAL_NOSET_MUSA_VISIBLE_DEVICES"]
    assert platform.ray_resource_options(1) == {"resources": {"musa": 1}}
    assert not platform.is_available()


def test_allocator_settings_are_not_left_out_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rlcore.integrations.verl.platform import RlcorePlatform

    RlcorePlatform().set_allocator_settings("expandable_segments:True")
    assert "allocator settings are left as they are, not 'expandable_segments:True'" in caplog.text


# ------------------------------------------------------------------------------------------------------- kernel


def scored(module: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> list[Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    logprob, entropy = module(hidden, weight, ids, temperature=0.7)
    (logprob * 1.5 + entropy * 0.5).sum().backward()
    return [logprob.detach(), entropy.detach(), hidden.grad, weight.grad]


def in_float64(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    every = (hidden @ weight.T / temperature).log_softmax(-1)
    return every.gather(-1, ids[..., None]).squeeze(-1), -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
def test_scores_and_gradients_are_as_accurate_as_those_of_verl(dtype: torch.dtype, is_packed: bool) -> None:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    from rlcore.integrations.verl.kernel import LinearLogprobForPPO

    (verls,) = [base for base in LinearLogprobForPPO.__mro__ if base.__module__.startswith("verl.")]
    assert FusedLinearForPPO in (verls, LinearLogprobForPPO)
    torch.manual_seed(0)
    shape = (LETTERS.N * LETTERS.L,) if is_packed else (LETTERS.N, LETTERS.L)
    hidden, weight = torch.randn(*shape, LETTERS.H).to(dtype), torch.randn(LETTERS.V, LETTERS.H).to(dtype)
    ids = torch.randint(0, LETTERS.V, shape, dtype=torch.int32)
    found = scored(LinearLogprobForPPO(), hidden, weight, ids)
    plain = scored(verls(), hidden, weight, ids.long())
    exact = scored(in_float64, hidden.double(), weight.double(), ids.long())
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in plain]
    for number, name in enumerate(("log-probabilities", "entropies", "gradient of hidden", "gradient of weight")):
        assert_as_accurate(found[number], plain[number], exact[number], what=name)


def test_the_model_that_verl_patches_scores_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from verl.models.transformers.monkey_patch import patch_forward_with_backends
    from verl.utils.experimental import torch_functional

    from rlcore.integrations.verl import kernel

    class Model(transformers.Qwen2ForCausalLM):
        """verl patches classes."""

    torch.manual_seed(0)
    model = Model(transformers.Qwen2Config(
        vocab_size=LETTERS.V, hidden_size=LETTERS.H, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    ))  # fmt: skip
    monkeypatch.setattr(torch_functional, "FusedLinearForPPO", torch_functional.FusedLinearForPPO)
    kernel.install()
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return linear_logprob(*args, **options)

    monkeypatch.setattr(kernel, "linear_logprob", counted)
    ids = torch.randint(0, LETTERS.V, (2, 8))
    output = model(ids, temperature=0.7, return_dict=True)
    assert len(calls) == 1
    labels = ids.roll(-1, -1)
    plain = (model.lm_head(model.model(ids)[0]) / 0.7).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    double = model.double()
    exact = (double.lm_head(double.model(ids)[0]) / 0.7).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    assert_as_accurate(output.log_probs.detach(), plain.detach(), exact.detach())


# ------------------------------------------------------------------------------------------------------- engine


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group, and a verl that moves between "cuda" and "cpu" while all tensors are on the CPU."""
    from verl.plugin.platform import platform_manager
    from verl.workers.engine.fsdp import transformer_impl

    from rlcore.integrations.verl.platform import RlcorePlatform

    class CpuCalledCuda(RlcorePlatform):
        device_name = "cuda"

        def current_device(self) -> Any:
            return "cpu"

    monkeypatch.setattr(platform_manager, "_current_platform", CpuCalledCuda())
    monkeypatch.setattr(transformer_impl, "log_gpu_memory_usage", lambda *args, **options: None)  # asks a GPU
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def engine_of(kind: type, **config: Any) -> Any:
    """Return an engine of verl as ``initialize`` leaves it, over an FSDP2 module on the CPU."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (1,))
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    engine = kind.__new__(kind)
    engine.module, engine.optimizer = module, torch.optim.AdamW(module.parameters(), lr=0.1)
    settings = {"param_offload": True, "optimizer_offload": True, "forward_only": False, "fsdp_size": -1}
    engine.engine_config = SimpleNamespace(**settings | config)
    engine.optimizer_config = SimpleNamespace(clip_grad=1.0)
    engine.model_config = SimpleNamespace(lora={}, hf_config=SimpleNamespace(model_type="tiny"))
    engine._is_offload_param = engine._is_offload_optimizer = False
    engine._uses_fsdp2_cpu_offload_policy = engine._qat_enabled = False
    engine.scaler = engine.ulysses_parallel_group = None
    return engine


def step(engine: Any, number: int) -> None:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        torch.manual_seed(number)
        engine.module(torch.randn(4, 8)).square().sum().backward()
        engine.optimizer_step()


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: weight.full_tensor().detach().clone() for name, weight in engine.module.named_parameters()}


def test_steps_with_offload_between_them_are_those_without(one_rank: None) -> None:
    from rlcore.integrations.verl.engine import ArenaEngineWithLMHead

    away = engine_of(ArenaEngineWithLMHead)
    here = engine_of(ArenaEngineWithLMHead, param_offload=False, optimizer_offload=False)
    assert away.is_param_offload_enabled and away.is_optimizer_offload_enabled
    assert not here.is_param_offload_enabled and not here.is_optimizer_offload_enabled
    for number in range(3):
        step(away, number)
        step(here, number)
        assert away.arena.parts.state == {"weights": "offloaded", "optimizer": "offloaded", "grads": "offloaded"}
    with pytest.raises(StateError, match="weights of this FSDPSequential are offloaded"):
        away.module(torch.randn(4, 8))
    with away.eval_mode():
        assert away.arena.parts.state["optimizer"] == "offloaded"
        found = weights_of(away)
    for name, weight in weights_of(here).items():
        assert_same_bits(found[name], weight, name)


def test_an_export_has_the_weights_until_it_ends(one_rank: None) -> None:
    from rlcore.integrations.verl.engine import ArenaEngineWithLMHead

    engine = engine_of(ArenaEngineWithLMHead)
    step(engine, 0)
    engine.to("cuda")
    expected = weights_of(engine)
    engine.to("cpu")
    stream, peft_config = engine.get_per_tensor_param()
    found = {name: weight.clone() for name, weight in stream}
    assert peft_config is None
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert_same_bits(weight, expected[name], name)
    assert set(engine.arena.parts.state.values()) == {"offloaded"}
    shards = {name: shard.clone() for name, shard, _ in engine.get_per_tensor_param_shard()[0]}
    assert_same_bits(shards["2.bias"], expected["2.bias"].bfloat16(), "one rank has all")
    assert engine.arena.parts.state["weights"] == "offloaded"


def test_a_checkpoint_finds_weights_and_optimizer(one_rank: None) -> None:
    from rlcore.integrations.verl.engine import ArenaEngineWithLMHead

    class Manager:
        """The place of verl's checkpoint manager, which wants a tokenizer and a folder."""

        def save_checkpoint(self, **options: Any) -> None:
            engine.to("cuda", optimizer=False, grad=False)  # verl's would move what is away
            self.saved = [weights_of(engine), engine.optimizer.state_dict()]

        def load_checkpoint(self, **options: Any) -> None:
            engine.optimizer.load_state_dict(self.saved[1])

    engine = engine_of(ArenaEngineWithLMHead)
    engine.checkpoint_manager = Manager()
    step(engine, 0)
    engine.save_checkpoint("folder")
    assert engine.arena.parts.state == {"weights": "offloaded", "optimizer": "offloaded", "grads": "offloaded"}
    assert len(engine.checkpoint_manager.saved[1]["state"]) == 4
    engine.load_checkpoint("folder")
    assert engine.arena.parts.state == {"weights": "offloaded", "optimizer": "offloaded", "grads": "offloaded"}
    step(engine, 1)


def test_a_move_elsewhere_is_refused_and_of_fsdp2s_own_offload_nothing_moves(one_rank: None) -> None:
    from rlcore.integrations.verl.engine import ArenaEngineWithValueHead

    engine = engine_of(ArenaEngineWithValueHead, forward_only=True)
    with pytest.raises(InvalidInputError, match="moves to 'cuda' or 'cpu', got 'meta'"):
        engine.to("meta")
    with pytest.raises(AssertionError, match="along with model parameters"):
        engine.to("cpu", model=False)
    engine.to("cpu")
    engine.module(torch.randn(4, 8))
    engine._uses_fsdp2_cpu_offload_policy = True
    assert not engine.is_param_offload_enabled
    assert not engine.is_optimizer_offload_enabled
