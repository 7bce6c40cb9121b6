"""Registers the benchmark cases of this project."""

from __future__ import annotations

from rlcore.hookspecs import RegisterBenchmark, hookimpl

_CASES = (
    "dispatch:device_lookup_case",
    "dispatch:op_choice_case",
    "kernels:linear_logprob_case",
    "kernels:linear_loss_case",
    "kernels:token_logprob_case",
    "quickstart:control_case",
    "quickstart:learns_case",
    "startup:help_case",
    "startup:import_case",
    "workers:call_case",
    "workers:receiving_case",
    "workers:sending_case",
    "workers:start_four_case",
    "workers:start_one_case",
)


@hookimpl
def rlcore_register_benchmarks(register: RegisterBenchmark) -> None:
    for case in _CASES:
        register(f"rlcore.bench.cases.{case}")
