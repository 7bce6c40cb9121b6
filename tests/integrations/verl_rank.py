"""A trainer rank of verl with rlcore's engine, and the rollout that verl makes for it; the rollout's vLLM is here too.

python -m tests.integrations.verl_rank RANK SIZE FOLDER OUT KIND

KIND is "vllm", for a vLLM with verl's worker extension, or "modules", for transformers' models in the place of vLLM's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rlcore
from tests.engines.sampling.vllm.stock import PROMPTS, greedy

BACKEND = {"vllm": {"weight_transfer_config": {"backend": "rlcore_ipc"}}}


def stand_in_for_vllm() -> None:
    """Let verl's rollout be imported where there is no vLLM, which brings zmq along."""
    import importlib.metadata

    sys.modules.setdefault("zmq", types.ModuleType("zmq"))
    found: Any = types.ModuleType("verl.third_party.vllm")
    found.VLLM_SLEEP_LEVEL = 2
    sys.modules["verl.third_party.vllm"] = found
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.33.0" if name == "vllm" else version(name)


class ModuleWorker:
    """The calls of one vLLM worker that a sync makes, with a transformers model in the place of vLLM's."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls: list[str] = []

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> None:
        self.calls.append(method)
        if method == "init_weight_transfer_engine":
            self.control = rlcore.connect_control(kwargs["init_info"]["address"])
            self.receiver = rlcore.WeightReceiver(self.module, self.control)
        elif method == "update_weights":
            self.receiver.receive(kwargs["update_info"]["timeout_s"])

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    def tokens(self) -> list[list[int]]:
        return greedy(self.module)

    def close(self) -> None:
        self.control.close()


class VllmWorker:
    """A vLLM with verl's worker extension, in a process of its own."""

    def __init__(self, folder: str) -> None:
        from vllm import LLM

        self.llm = LLM(
            folder,
            **BACKEND["vllm"],
            worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            kv_cache_memory_bytes=1 << 24,
            gpu_memory_utilization=0.01,
        )
        self.collective_rpc, self.reset_prefix_cache = self.llm.collective_rpc, self.llm.reset_prefix_cache
        self.calls: list[str] = []

    def tokens(self) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        prompts: Any = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [list(one.outputs[0].token_ids) for one in self.llm.generate(prompts, params, use_tqdm=False)]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Server:
    """The handle of verl's server, an actor of Ray."""

    def __init__(self, worker: Any) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self.steps: list[int] = []
        self.collective_rpc = self._remote(worker.collective_rpc)
        self.clear_kv_cache = self._remote(worker.reset_prefix_cache)
        self.set_global_steps = self._remote(self.steps.append)

    def _remote(self, method: Any) -> SimpleNamespace:
        def remote(*args: Any, **options: Any) -> Any:
            return asyncio.wrap_future(self._pool.submit(method, *args, **options))

        return SimpleNamespace(remote=remote)


def engine_of(module: nn.Module, size: int) -> Any:
    """Return rlcore's engine of verl as ``initialize`` leaves it, over an FSDP2 module."""
    from rlcore.integrations.verl.engine import ArenaEngineWithLMHead

    mesh = init_device_mesh("cpu", (size,))
    for layer in (*module.model.layers, module):
        fully_shard(layer, mesh=mesh)
    engine: Any = ArenaEngineWithLMHead.__new__(ArenaEngineWithLMHead)
    engine.module, engine.optimizer = module, torch.optim.SGD(module.parameters(), lr=0.05)
    engine.engine_config = SimpleNamespace(param_offload=True, optimizer_offload=True, forward_only=False, fsdp_size=-1)
    engine.model_config = SimpleNamespace(lora={"merge": True}, hf_config=module.config)
    engine._is_offload_param = engine._is_offload_optimizer = False
    engine._uses_fsdp2_cpu_offload_policy = engine._qat_enabled = False
    return engine


def rollout_of(server: Server, **changed: Any) -> Any:
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.vllm_rollout import vllm_rollout

    vllm_rollout.ray.get_runtime_context = lambda: SimpleNamespace(get_job_id=lambda: "01")
    config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, **{"engine_kwargs": BACKEND} | changed)
    rollout: Any = get_rollout_class("vllm", "async")(config, HFModelConfig.__new__(HFModelConfig), None)
    rollout.server_handle = server
    return rollout


def whole(module: Any, folder: str) -> Any:
    """Return a model of transformers with the weights of a sharded one."""
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(folder)
    found.load_state_dict({name: tensor.full_tensor() for name, tensor in module.state_dict().items()})
    return found


def step(engine: Any) -> None:
    engine.to("cuda")
    ids = torch.tensor([[9, 0, 2, 1, 3, 4]])
    engine.module(ids, labels=ids).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


class Unwilling:
    """A vLLM that does not connect on rank 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def collective_rpc(self, method: str, kwargs: Any, **options: Any) -> None:
        if self._rank:
            raise RuntimeError("no backend rlcore_ipc")
        rlcore.connect_control(kwargs["init_info"]["address"])

    def reset_prefix_cache(self) -> None:
        raise AssertionError("nothing came")


def refusals(engine: Any, rank: int) -> list[str]:
    """Return what is said of weights that are no engine's, of several machines, and of a vLLM that does not connect."""

    def refusal(weights: Any) -> str:
        try:
            asyncio.run(rollout_of(Server(Unwilling(rank))).update_weights(weights))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found = [refusal(iter([]))]
    os.environ["RAY_LOCAL_WORLD_SIZE"] = "1"
    found.append(refusal(engine.get_per_tensor_param()[0]))
    os.environ["RAY_LOCAL_WORLD_SIZE"] = "2"
    return [*found, refusal(engine.get_per_tensor_param()[0])]


def main(rank: int, size: int, folder: str, out: str, kind: str) -> None:
    from transformers import AutoModelForCausalLM
    from verl.plugin.platform import platform_manager
    from verl.workers.engine.fsdp import transformer_impl

    from rlcore.integrations.verl.platform import RlcorePlatform

    class CpuCalledCuda(RlcorePlatform):
        device_name = "cuda"

        def current_device(self) -> Any:
            return "cpu"

        def is_ipc_supported(self) -> bool:
            return True

    platform_manager._current_platform = CpuCalledCuda()
    transformer_impl.log_gpu_memory_usage = lambda *args, **options: None
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}/store", size), rank=rank, world_size=size)
    engine = engine_of(AutoModelForCausalLM.from_pretrained(folder), size)
    worker: Any = VllmWorker(folder) if kind == "vllm" else ModuleWorker(AutoModelForCausalLM.from_pretrained(folder))
    server = Server(worker)
    rollout = rollout_of(server)
    said: dict[str, Any] = {"first": worker.tokens(), "steps": server.steps, "rounds": []}
    for number in (5, 6, 7):  # all leaves between the last two, while vLLM has its memory open
        step(engine)
        expected = greedy(whole(engine.module, folder))
        if number == 7:
            engine.to("cpu")
        weights, peft_config = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
        asyncio.run(rollout.update_weights(weights, peft_config=peft_config, base_sync_done=True, global_steps=number))
        said["rounds"].append([worker.tokens(), expected, engine.arena.parts.state["weights"]])
    said["calls"] = worker.calls
    if kind == "modules":
        said["refused"] = refusals(engine, rank)
    Path(out, f"rank-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    worker.close()
    sys.stdout.flush()
    os._exit(0)  # threads of Ray and of this file end with the process


if __name__ == "__main__":
    arguments: Any = sys.argv[1:]
    os.environ |= {"RANK": arguments[0], "WORLD_SIZE": arguments[1], "RAY_LOCAL_WORLD_SIZE": arguments[1]}
    if arguments[4] == "modules":
        stand_in_for_vllm()
    main(int(arguments[0]), int(arguments[1]), *arguments[2:])
