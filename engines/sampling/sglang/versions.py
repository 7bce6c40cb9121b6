"""All uses of SGLang's code, and the differences between its versions."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlcore._torch_private import FileStore
from rlcore.device import Device
from rlcore.engines.sampling.replica import version_bounds
from rlcore.engines.sampling.replica.meta_tensors import made_on
from rlcore.engines.sampling.sglang.interfaces import (
    SglangEngine,
    SglangModelRunner,
    SglangRequest,
    SglangSamplingInfo,
    SglangScheduler,
)
from rlcore.errors import DeviceError, InvalidInputError, MissingDependencyError, RlcoreError, UnsupportedError

OLDEST, NEWEST = (0, 5, 15), (0, 5, 23)
_EXPERTS_ON_HOSTS = (0, 5, 21)
"""The first version in which they were seen; 0.5.17 does not return them."""
SAMPLER = "pytorch"
"""The sampling backend in whose place rlcore's sampler is: SGLang's build for the CPU takes no other."""
SCHEDULER_LOG = "sglang.srt.managers.scheduler"
"""The log in which a scheduler says what ends it, as its only error."""

# Defaults that the user's own environment overrides.
_ENVIRONMENT = {
    "FLASHINFER_LOGGING_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",  # a replica is on one host: nothing has to be reached from another
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",  # the model is a folder
    # NCCL's own default, by its number, so that a scheduler has what the trainer's process has: where it is not set
    # SGLang sets 0. In a weight sync by "collective" they are one communicator, and with other kinds of memory at its
    # ends one asks for a handle that the other cannot give, and waits in NCCL for ever (proxyGetFd in its proxy.cc). On
    # NCCL_NVLS_ENABLE, which SGLang sets too, NCCL's ranks agree by themselves.
    "NCCL_CUMEM_ENABLE": "-2",
}


def prepare(device: Device, num_devices: int) -> str:
    """Set SGLang's environment and import it; return its version.

    Args:
        num_devices: how many devices the replica has.

    Raises:
        MissingDependencyError: SGLang is not installed.
        UnsupportedError: a version that is older than rlcore knows.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if num_devices > 1:  # ranks that sample in different orders of rounding would go on with different tokens
        os.environ["SYNC_TOKEN_IDS_ACROSS_TP"] = "1"
    if device.spec.is_host:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        if num_devices > 1:  # else SGLang wants a NUMA node for each rank
            cores = sorted(os.sched_getaffinity(0))
            each = [str(cores[rank % len(cores)]) for rank in range(num_devices)]
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(each))
    _be_quiet()
    try:
        import sglang
    except ImportError as error:
        raise MissingDependencyError("sglang", needed_for="the sglang executor", extra="sglang") from error
    version: str = sglang.__version__
    check_version(version)
    return version


def _be_quiet() -> None:
    """Hide warnings of what this device does not have, here and in the processes that SGLang starts."""
    warnings.filterwarnings("ignore", category=UserWarning, module="sglang")
    given = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (given, "ignore::UserWarning")))


def check_version(version: str) -> None:
    """Check the version of SGLang as ``version_bounds.check_version`` does, with the bounds above."""
    version_bounds.check_version("SGLang", version, OLDEST, NEWEST)


def check_experts_of_host(asked: str, version: str, device_name: str) -> None:
    """Refuse to return the experts of tokens on a host by a version of which ``_pin_no_memory_of_hosts`` is no help.

    Args:
        asked: the argument of ``build()``.

    Raises:
        UnsupportedError: a version whose memory for them is pinned, which takes CUDA.
    """
    if version_bounds.numbers_of(version, 3) < _EXPERTS_ON_HOSTS:
        first = ".".join(map(str, _EXPERTS_ON_HOSTS))
        raise UnsupportedError(
            f"{asked} on {device_name}",
            f"SGLang {version} pins its memory for them, which takes CUDA; run: pip install 'sglang>={first}', or "
            "sample by executor='hf', or on a GPU",
        )


# ------------------------------------------------------------------------------------------ the engine's process


def new_engine(
    arguments: Mapping[str, Any], folder: str, run_scheduler: Callable[..., None], why_ended: Callable[[], str]
) -> SglangEngine:
    """Make an SGLang engine, in the thread whose event loop it is to have.

    SGLang sets handlers of signals where this is the main thread, which would end the whole process.

    Args:
        folder: where SGLang makes its sockets; the caller removes it.
        run_scheduler: a function of a module, called in each scheduler's process instead of SGLang's own.
        why_ended: returns the error that has ended a scheduler.

    Raises:
        InvalidInputError: SGLang refuses the arguments.
        RlcoreError: a scheduler could not start; says why.
    """
    from sglang.srt.entrypoints.engine import Engine

    class RlcoreEngine(Engine):  # type: ignore[misc]
        """Starts no process that makes texts of tokens: rlcore makes them."""

        run_scheduler_process_func = staticmethod(run_scheduler)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
            return [], []

    with _temporary_files_in(folder):
        try:
            engine: Any = RlcoreEngine(**arguments)
        except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
            raise InvalidInputError(f"SGLang refuses these arguments of build(): {error}") from error
        except (RuntimeError, EOFError) as error:
            raise RlcoreError(f"SGLang could not start: {why_ended() or error}") from error
    found: SglangEngine = engine
    return found


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Let Python make temporary files in ``folder``: SGLang makes its sockets of such, and leaves them behind."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def generate_request(name: str, token_ids: list[int], params: dict[str, Any], *, returns_experts: bool) -> Any:
    """Return the request of one sample, with the log-probs of its tokens, that answers once, at its end."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(
        rid=name,
        input_ids=token_ids,
        sampling_params=params,
        return_logprob=True,
        return_routed_experts=returns_experts,
        stream=False,
    )


def routed_experts(about: Mapping[str, Any], layers: int) -> Tensor:
    """Return the experts of a completion's tokens, [tokens, layers, experts a token] int16.

    Args:
        about: what SGLang says of the output.
        layers: of the model.
    """
    found = torch.frombuffer(bytearray(base64.b64decode(about["routed_experts"])), dtype=torch.int32)
    num_tokens = about["prompt_tokens"] + about["completion_tokens"] - 1  # the last one never ran
    return found.view(num_tokens, layers, -1).to(torch.int16)


# ------------------------------------------------------------------------------------------ a scheduler's process


def run_scheduler(
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    *,
    rpc: Callable[[SglangScheduler], None],
    sample: Callable[[Tensor, SglangSamplingInfo, Tensor], tuple[Tensor, Tensor]],
    folder: str,
) -> None:
    """Run SGLang's scheduler in this process, until it ends.

    Args:
        arguments, keywords: as SGLang gives them to the function of a scheduler's process.
        rpc: becomes the scheduler's method ``rlcore_serve``, which ``collective_rpc`` calls on all ranks.
        sample: see ``rlcore.engines.sampling.sglang.sampling``.
        folder: for the rendezvous of the ranks.
    """
    from sglang.srt.managers import scheduler as schedulers

    schedulers.Scheduler.rlcore_serve = rpc
    _give_seeds()
    _register_sampler(sample)
    _meet_in(folder)
    _pin_no_memory_of_hosts()
    schedulers.run_scheduler_process(*arguments, **keywords)


def _give_seeds() -> None:
    """Let batches have the seeds of their requests, which SGLang gives to its own deterministic sampler only."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    real = SamplingBatchInfo.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, *args: Any, **keywords: Any) -> Any:
        info = real(cls, batch, *args, **keywords)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]  # its warm-up has none
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)


def _register_sampler(sample: Callable[..., tuple[Tensor, Tensor]]) -> None:
    from sglang.srt.layers.sampler import Sampler, register_sampler_backend

    class RlcoreSampler(Sampler):  # type: ignore[misc]
        def forward(  # noqa: PLR0917 - SGLang gives them by position
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: Any,
            token_ids_logprobs: Any,
            positions: Tensor,
        ) -> Tensor:
            token_B, logprob_BV = sample(logits_output.next_token_logits, sampling_info, positions)
            self._sync_token_ids_across_tp(token_B, sampling_info)
            if return_logprob:
                logits_output.next_token_logprobs = logprob_BV.gather(1, token_B[:, None]).squeeze(1)
            return token_B

    register_sampler_backend(SAMPLER, RlcoreSampler)


def _meet_in(folder: str) -> None:
    """Let the ranks meet through a file: torch's store would listen on all of the host's addresses."""
    real = torch.distributed.init_process_group

    def init_process_group(*args: Any, **keywords: Any) -> None:
        if str(keywords.get("init_method", "")).startswith("tcp://"):
            del keywords["init_method"]
            path = os.path.join(folder, "sglang_ranks")
            keywords["store"] = FileStore(path, keywords["world_size"])
        real(*args, **keywords)

    torch.distributed.init_process_group = init_process_group


def _pin_no_memory_of_hosts() -> None:
    """Let an engine on a host keep the experts of tokens in plain memory: SGLang would pin it, which takes CUDA.

    Before 0.5.21 it asks torch for them, and not this table: see ``check_experts_of_host``.
    """
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any) -> Tensor:
        plain: Tensor = allocator.allocate(dims, dtype=dtype, device=device)
        return plain

    ALLOC_MEMORY_FUNCS["cpu"] = allocate


def model_runner(scheduler: SglangScheduler) -> SglangModelRunner:
    return scheduler.tp_worker.model_runner


def num_layers(runner: SglangModelRunner) -> int:
    return runner.model_config.num_hidden_layers


def limits(scheduler: SglangScheduler) -> tuple[int, int]:
    """Return the most tokens of a prompt and its completion together, and of a prompt.

    SGLang cuts longer completions short without a word. In the KV cache it leaves a page and a token beside the whole
    pages of the prompt, so that at most two pages are lost.
    """
    in_cache = scheduler.max_total_num_tokens - 2 * scheduler.page_size
    return min(scheduler.max_req_len - 1, in_cache), scheduler.max_req_input_len - 1


def forget_stop_tokens(scheduler: SglangScheduler) -> None:
    """Let no request end at a token but at those that it names; SGLang has no way to say that of the model's own."""
    scheduler.model_config.hf_eos_token_id = set()


def pause(scheduler: SglangScheduler, *, keeps_cache: bool) -> None:
    """Make no more steps. Requests under way stay as they are, or wait without a cache and compute theirs again."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    scheduler.pause_generation(PauseGenerationReqInput(mode="in_place" if keeps_cache else "retract"))


def go_on(scheduler: SglangScheduler) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))


def flush_cache(scheduler: SglangScheduler) -> None:
    """Drop all keys and values. The scheduler is paused, and no request has a cache.

    Raises:
        RlcoreError: SGLang has refused.
    """
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []  # some versions refuse while requests wait
    try:
        if not scheduler.flush_cache(empty_cache=False):
            raise RlcoreError("SGLang did not drop its prefix cache: requests still hold some of it")
    finally:
        scheduler.waiting_queue = waiting


def unfinished(scheduler: SglangScheduler) -> list[SglangRequest]:
    """Return the requests under way, each once."""
    found: list[SglangRequest] = [*scheduler.waiting_queue, *scheduler.running_batch.reqs]
    if scheduler.last_batch is not None:
        found += scheduler.last_batch.reqs
    if scheduler.chunked_req is not None:
        found += [scheduler.chunked_req]
    return list({request.rid: request for request in found if not request.finished()}.values())


def kv_caches(scheduler: SglangScheduler) -> list[Tensor]:
    """Return the tensors in the memory of the KV cache: keys and values, and the table of each request's places.

    Captured graphs read row 0 of the table for what pads a batch, so that it must hold places.

    Raises:
        UnsupportedError: keys and values are where they are not found.
    """
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    values = [value for value in vars(pool).values() if isinstance(value, list)]
    found = [tensor for value in values for tensor in value if isinstance(tensor, Tensor)]
    if not found:
        one_pool = "; try build(disable_hybrid_swa_memory=True)" if "swa_kv_pool" in vars(pool) else ""
        raise UnsupportedError(f"SGLang's {type(pool).__name__}", f"its memory cannot be moved{one_pool}")
    return [*found, scheduler.req_to_token_pool.req_to_token]


def meta_model(runner: SglangModelRunner) -> nn.Module:
    """Return another instance of the model on the meta device, with this rank's shards."""
    from sglang.srt.model_loader.loader import _initialize_model

    with made_on("meta", runner.model_config.dtype):
        model: nn.Module = _initialize_model(runner.model_config, runner.load_config)
    return model


def load(runner: SglangModelRunner, weights: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Load weights into the live model as SGLang does, with its processing after loading."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.load_weights_and_postprocess(runner.model, weights, device)


def lacks_flash_attention(device: Device) -> bool:
    """Return True where SGLang would take FlashAttention 3, as it does on Hopper, and its kernels are without it."""
    with contextlib.suppress(ImportError):  # SGLang says what its kernels lack
        is_hopper = device.properties().capability.startswith("9.")
        return is_hopper and importlib.util.find_spec("sgl_kernel.flash_ops") is None
    return False


def memory_saver() -> Any:
    """Return the module that unmaps memory under a tag, and maps it again at the same addresses."""
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver


def require_memory_saver() -> None:
    """Check that this process allocates by the memory saver, whose library SGLang has the loader of programs preload.

    Raises:
        DeviceError: the loader did not find what that library needs, and went on without it.
    """
    if not hasattr(ctypes.CDLL(None), "tms_pause"):  # names of preloaded libraries are known to all
        raise DeviceError(
            "torch_memory_saver was not preloaded, so that offload() could give no memory: the loader does not find "
            "CUDA's runtime. Add the folder of libcudart.so to LD_LIBRARY_PATH before the program starts"
        )
