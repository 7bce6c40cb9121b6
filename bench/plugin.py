"""Registers the benchmark cases of this project.

Those that other libraries take part in are in a checkout alone (``PEERS``): the wheel leaves them out.
"""

from __future__ import annotations

from pathlib import Path

from rlcore.hookspecs import RegisterBenchmark, hookimpl

_MODULES = (
    "attention", "collectives", "dispatch", "experts", "ipc", "kernel_scans", "kernels",
    "materialize", "memory", "offload", "parallel", "product", "quickstart", "reinforcement",
    "sizes_of_one", "startup", "trainer_offload", "training", "weight_sync", "weight_sync_copies", "workers", "zero",
)  # fmt: skip
PEERS = Path(__file__).parent / "cases" / "peers"
"""The folder of what needs vLLM, Liger, TRL, flash-attn and the like."""


@hookimpl
def rlcore_register_benchmarks(register: RegisterBenchmark) -> None:
    for module in _MODULES:
        register(f"rlcore.bench.cases.{module}:cases")
    for module in (
        ("peers.race", "peers.sglang", "peers.vllm", "peers.vllm_float8") if PEERS.is_dir() else ("from_a_clone",)
    ):
        register(f"rlcore.bench.cases.{module}:cases")
