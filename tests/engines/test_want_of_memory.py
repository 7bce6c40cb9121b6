"""Allocations that fail in workers: the error says what was asked for, and what holds the rest."""

from __future__ import annotations

import errno
import re
from typing import Any

import pytest
import torch

import rlcore
from rlcore.engines.launchers.want_of_memory import want_of_memory
from rlcore.engines.offload.host_arena import arena_of
from rlcore.errors import DeviceError, WorkerError
from rlcore.nn import HuggingFaceTrainModule

TOO_MUCH = 1 << 56
"""Bytes that no process can address."""


@pytest.fixture(scope="module")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

        def take(self, nbytes: int) -> None:
            torch.empty(nbytes, dtype=torch.uint8, device=next(self.parameters()).device)

        def fail_for_want_of_memory(self, nbytes: int) -> None:
            try:
                self.take(nbytes)
            except RuntimeError as error:
                raise DeviceError("planted") from error

    return Policy


def held(text: str) -> dict[str, int]:
    found = re.search(r"Held by rlcore here, in bytes: (.*)\.$", text, re.MULTILINE)
    assert found, text
    return {what: int(nbytes) for what, nbytes in re.findall(r"([^,].*?) (\d+)(?:, |$)", found[1])}


def test_an_engine_says_what_its_parts_hold(engine: rlcore.TrainEngine) -> None:
    weights = engine.memory_report()[0]["tags"]["weights"]["device_bytes"]
    arena = arena_of(rlcore.get_device("cpu"))
    arena.reserve(arena.free_bytes + (1 << 20))
    arena.wait()
    asked = (
        rf"(?s)^module.take\(\) failed on rank 0 \(cpu:0\): RuntimeError.*\n\n{TOO_MUCH} bytes were asked for\. This"
    )
    with pytest.raises(WorkerError, match=asked) as caught:
        engine.take(TOO_MUCH)
    expected = {
        "weights of the train engine on cpu:0": weights,
        "host memory for offloads and saves of cpu:0, free": arena.free_bytes,
    }
    assert held(str(caught.value)).items() >= expected.items()
    with pytest.raises(DeviceError, match="planted") as ours:
        engine.fail_for_want_of_memory(TOO_MUCH)
    assert ours.value.__notes__[0].startswith(f"{TOO_MUCH} bytes were asked for.")
    assert held(ours.value.__notes__[0]).items() >= expected.items()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), r"^Memory was asked for, and the error does not say how much\. This process has \d+"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "does not say how much"),
        (MemoryError("Unable to allocate 1.50 GiB for an array with shape"), rf"^About {3 << 29} bytes were asked"),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.67 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
                "1.12 GiB is free. Of the allocated memory 137.01 GiB is allocated by PyTorch"
            ),
            r"^About 2866890670 bytes were asked for \(2\.67 GiB\)\. This process has",
        ),
        (RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60 GiB"), rf"^About {2 << 30} bytes were"),
        (
            torch.AcceleratorError(
                "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com for more "
                "information.\nCUDA kernel errors might be asynchronously reported at some other API call",
            ),
            r"^Memory was asked for, and the error does not say how much\. This process has \d+",
        ),
        (RuntimeError("HIP error: out of memory"), "does not say how much"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "does not say how",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "does not say how much"),
        (RuntimeError("shapes cannot be multiplied"), "^$"),
        (RuntimeError("CUDA error: device-side assert triggered"), "^$"),
        (RuntimeError("Expected all tensors to be on the same device; the notes say: out of memory"), "^$"),
        (OSError(errno.ENOENT, "No such file"), "^$"),
    ],
    ids=[
        *("no words", "system", "numpy", "cuda", "npu", "cuda's driver", "hip's driver", "cublas", "triton"),
        *("another error", "another error of a device", "a user's words", "another error of the system"),
    ],
)
def test_the_words_of_each_library_are_read(error: BaseException, text: str) -> None:
    assert re.search(text, want_of_memory(error, rlcore.get_device("cpu")))


@pytest.mark.gpu
def test_a_device_says_what_its_allocator_has() -> None:
    device = rlcore.get_device("cuda")
    kept = torch.empty(1 << 20, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 45, device="cuda", dtype=torch.uint8)
    text = want_of_memory(caught.value, device)
    assert text.startswith(f"About {1 << 45} bytes were asked for (32768.00 GiB).")
    found = re.search(r"allocator has (\d+) bytes of it in tensors and (\d+) cached", text)
    assert found and int(found[1]) >= kept.nbytes
    assert re.search(rf"{device.name} has \d+ bytes free of \d+\.", text)
