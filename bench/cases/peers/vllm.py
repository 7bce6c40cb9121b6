"""New weights for real vLLM, inside the loop in which trainer and sampler alternate on their devices.

One start of vLLM serves all of a case: the steady sync, the turn around it by phase, the first time that the engine
leaves its device, and, where the replica has one device, the ways that others send. Every way has to leave the same
bytes in vLLM's parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from rlcore.bench import steps
from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.bench.cases.peers.vllm_pair import QWEN_7B, QWEN_30B_A3B, Layout, ModelShape, VllmPair
from rlcore.bench.cases.peers.vllm_ways import Done, Ways, measured_limits
from rlcore.device import Device
from rlcore.errors import MissingDependencyError, UnsupportedError

_NUM_RUNS = 5
_MOST_NAMES_ONE_BY_ONE = 1000
"""More would take minutes."""
_FEW_RUNS = 2
"""Runs of each of vLLM's own ways where there are more names: it loads them one by one, for seconds."""


def _prepare(model: ModelShape, layout: Layout, device: Device) -> Work:
    if layout.devices > max(1, device.count()):
        raise UnsupportedError(f"this case on {device.spec.name}", f"it takes {layout.devices} devices")
    try:
        import vllm
    except ImportError as error:
        raise MissingDependencyError("vllm", needed_for="this case", extra="vllm") from error
    pair = VllmPair(model, layout, device)
    steps.begin("limits")
    try:
        limits = measured_limits(pair)  # while there is room
        pair.start()
    except BaseException:
        pair.close()
        raise
    ways = Ways(pair, limits)
    expected: dict[int, list[dict[str, int]]] = {}

    def check(done: Done) -> None:
        wanted = expected.setdefault(done.state, done.sums)
        expect(done.sums == wanted, "vLLM's parameters are not those that another way, or an earlier round, made")
        expect(expected.get(0) != expected.get(1), "the weights of two steps are the same")
        if done.report is not None:
            expect(
                done.report.fallback_bytes == 0, f"{done.report.fallback_bytes} bytes went through vLLM's own loader"
            )

    def check_again(done: Done) -> None:
        check(done)
        num_handles = done.report.handles_opened if done.report else 0
        expect(num_handles == 0, f"{num_handles} handles were opened anew, and nothing had moved")

    is_one_by_one_slow = pair.num_names > _MOST_NAMES_ONE_BY_ONE

    def contender(name: str, run: Callable[[], Done]) -> Contender:
        return Contender(
            name,
            most_runs=_FEW_RUNS if is_one_by_one_slow and name.startswith("vllm_ipc") else None,
            run=run,
            check=check_again if name == "again" else check,
            seconds=lambda done: done.seconds,
            quantities=lambda done: done.quantities,
        )

    contenders = {
        "turn": ways.turn,
        "again": ways.again,
        "packed": ways.packed,
        "nothing_new": ways.nothing_new,
    }
    if layout.devices == 1:
        contenders["vllm_ipc"] = functools.partial(ways.vllm_ipc, is_packed=False)
        contenders["vllm_ipc_packed"] = functools.partial(ways.vllm_ipc, is_packed=True)
        if not is_one_by_one_slow:
            contenders["per_tensor"] = ways.per_tensor
    return Work(
        tuple(contender(name, run) for name, run in contenders.items()),
        {
            "model": pair.name,
            "bytes": pair.nbytes,
            "names": pair.num_names,
            "trainer": layout.shards,
            "tensor_parallel": layout.tensor_parallel,
            "replicas": layout.replicas,
            "vllm": vllm.__version__,
        },
        num_runs=_NUM_RUNS,
        close=pair.close,
    )


def _case(name: str, model: ModelShape, layout: Layout, estimate_s: float) -> Case:
    shape = f"{layout.shards} to {layout.tensor_parallel} x {layout.replicas}, " if layout.devices > 1 else ""
    return Case(
        f"weight_sync/vllm/{name}",
        f"new weights for real vLLM, {shape}{model.name} shapes (tiny on a host), and the turn around it",
        functools.partial(_prepare, model, layout),
        effort="full",
        estimate_s=estimate_s,
    )


cases = (
    _case("7b", QWEN_7B, Layout(), 100.0),
    _case("30b_a3b", QWEN_30B_A3B, Layout(), 230.0),
    _case("7b_2_to_tp2", QWEN_7B, Layout(2, 2), 90.0),
    _case("7b_4_to_tp2_dp2", QWEN_7B, Layout(4, 2, 2), 120.0),
    _case("30b_a3b_2_to_tp2", QWEN_30B_A3B, Layout(2, 2), 180.0),
    _case("30b_a3b_4_to_tp2_dp2", QWEN_30B_A3B, Layout(4, 2, 2), 240.0),
)
