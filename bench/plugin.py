"""Registers the benchmark cases of this project."""

from __future__ import annotations

from rlcore.hookspecs import RegisterBenchmark, hookimpl

_CASES = (
    "dispatch:device_lookup_case",
    "dispatch:op_choice_case",
    "host_memory:alloc_case",
    "host_memory:batch_to_device_case",
    "host_memory:batch_to_host_case",
    "host_memory:to_device_case",
    "host_memory:to_host_case",
    "ipc:copy_case",
    "ipc:open_case",
    "kernel_losses:linear_loss_05b",
    "kernel_losses:linear_loss_14b",
    "kernel_losses:linear_loss_17b",
    "kernel_losses:linear_loss_8b",
    "kernel_losses:sequences_05b",
    "kernel_losses:sequences_14b",
    "kernel_losses:sequences_17b",
    "kernel_losses:sequences_8b",
    "kernel_scans:gae_case",
    "kernel_scans:groups_case",
    "kernel_scans:return_case",
    "kernel_scans:token_loss_case",
    "kernels:accuracy_case",
    "kernels:linear_logprob_05b",
    "kernels:linear_logprob_14b",
    "kernels:linear_logprob_17b",
    "kernels:linear_logprob_8b",
    "kernels:linear_logprob_forward_05b",
    "kernels:linear_logprob_forward_14b",
    "kernels:linear_logprob_forward_17b",
    "kernels:linear_logprob_forward_8b",
    "kernels:token_logprob_case",
    "kernels:token_logprob_forward_case",
    "packed_attention:even_case",
    "packed_attention:uneven_case",
    "offload:cycle_case",
    "offload:first_case",
    "offload:swap_case",
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
