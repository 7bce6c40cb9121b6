"""Thousands of copies in one call: that each arrives, and what is refused before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.errors import InvalidInputError

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool)


def large(device: Any) -> int:
    """Numbers that a GPU takes a while to copy; the host is done when a call returns."""
    return 1 << (16 if device.type == "cpu" else 22)


def many(num: int, where: Any, *, pinned: bool = False, filled: bool = True) -> list[torch.Tensor]:
    """Of sizes from none to some pages, of many dtypes, each a view into memory of its own."""
    tensors = []
    for number in range(num):
        size, dtype = (number * 37) % 3001, DTYPES[number % len(DTYPES)]
        tensor = torch.zeros(size, dtype=dtype, device=where, pin_memory=pinned)
        tensors.append(tensor.fill_(number % 2 if dtype == torch.bool else number % 100) if filled else tensor)
    return tensors


def assert_equal(dst: list[torch.Tensor], src: list[torch.Tensor]) -> None:
    for to, from_ in zip(dst, src, strict=True):
        assert torch.equal(to.cpu(), from_.cpu())


@pytest.mark.parametrize("way", ["device to host", "host to device", "on the device"])
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_every_tensor_arrives(device: Any, way: str, pinned: bool) -> None:
    pinned = pinned and device.memory.can_pin
    on_device, host = {"where": device.torch_device}, {"where": "cpu", "pinned": pinned}
    from_, to = {
        "device to host": (on_device, host),
        "host to device": (host, on_device),
        "on the device": (on_device, on_device),
    }[way]
    src, dst = many(2000, **from_), many(2000, **to, filled=False)
    device.memory.copy_batch(dst, src)
    device.synchronize()
    assert_equal(dst, src)


def test_a_batch_may_go_both_ways_and_be_strided(device: Any) -> None:
    at, pin = device.torch_device, device.memory.can_pin
    src = [
        torch.arange(12.0, device=at).reshape(3, 4).t(),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.arange(5, device=at),
        torch.full((), 3.0, device=at),
    ]
    dst = [
        torch.zeros(4, 3, pin_memory=pin),
        torch.zeros(3, 6, device=at)[:, ::3],
        torch.zeros(5, dtype=torch.int64, device=at),
        torch.zeros((), pin_memory=pin),
    ]
    device.memory.copy_batch(dst, src)
    device.synchronize()
    assert_equal(dst, src)


def test_parameters_are_filled_in_place(device: Any) -> None:
    layer = torch.nn.Linear(4, 4, device=device.torch_device)
    values = [torch.full_like(parameter, 2.0) for parameter in layer.parameters()]
    device.memory.copy_batch(list(layer.parameters()), values)
    assert all(parameter.requires_grad and parameter.eq(2).all() for parameter in layer.parameters())


def test_copies_on_the_current_stream_stand_between_its_work(device: Any) -> None:
    """Nothing waits on the host: the copy out must see the first fill, and not the second."""
    source = torch.zeros(large(device), device=device.torch_device)
    host = [torch.zeros(large(device), pin_memory=device.memory.can_pin) for _ in range(4)]
    for value, buffer in enumerate(host):
        source.fill_(value)
        device.memory.copy_batch([buffer], [source])
    source.fill_(-1)
    device.memory.copy_batch([source], [host[3]])
    doubled = source * 2
    device.synchronize()
    assert [buffer.unique().tolist() for buffer in host] == [[0], [1], [2], [3]]
    assert doubled.unique().tolist() == [6]


def test_host_memory_freed_at_once_is_not_used_again_too_early(device: Any) -> None:
    targets = [torch.zeros(large(device), device=device.torch_device) for _ in range(8)]
    for value, target in enumerate(targets):
        source = torch.full((large(device),), float(value), pin_memory=device.memory.can_pin)
        device.memory.copy_batch([target], [source])
        del source
    device.synchronize()
    assert [target.unique().tolist() for target in targets] == [[value] for value in range(8)]


def test_pairs_that_differ_are_refused(device: Any) -> None:
    at = device.torch_device
    for dst, src, message in (
        ([torch.zeros(2, device=at)], [], r"^copy_batch takes a source for each destination, got 1 and 0$"),
        (
            [torch.zeros(2), torch.zeros(2, device=at)],
            [torch.ones(2), torch.zeros(3, device=at)],
            r"pairs of equal shape and dtype, got float32 \[2\] from float32 \[3\] as pair 1$",
        ),
        ([torch.zeros(2)], [torch.zeros(2, dtype=torch.int8)], r"got float32 \[2\] from int8 \[2\] as pair 0$"),
        (torch.zeros(2, 2), torch.ones(2, 2), r"^copy_batch takes two sequences of tensors, got Tensor$"),
        ([torch.zeros(2)], [None], r"^copy_batch takes plain tensors, got NoneType; of a DTensor give to_local\(\)$"),
        ([torch.zeros(2)], [torch.zeros(2, device="meta")], r"takes tensors there and in host memory, got \['meta'\]$"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            device.memory.copy_batch(dst, src)
        assert all(not tensor.any() for tensor in dst)


@pytest.mark.parametrize("offset", [0, 100])
def test_tensors_whose_memory_was_freed_are_refused(device: Any, offset: int) -> None:
    there, away = (torch.zeros(200, device=device.torch_device) for _ in range(2))
    views = [tensor[offset:][:50] for tensor in (there, away)]
    away.untyped_storage().resize_(0)
    for dst, src, what in ((*views, "source"), (*views[::-1], "destination")):
        message = rf"that of the {what} of pair 1, float32 \[50\] on {away.device}, was freed: bring it back first"
        with pytest.raises(InvalidInputError, match=message):
            device.memory.copy_batch([torch.ones(3), dst], [torch.ones(3), src])
    away.untyped_storage().resize_(there.nbytes)
    device.memory.copy_batch([away], [there.add_(1)])
    device.synchronize()
    assert away.eq(1).all()


def test_overlap_is_refused(device: Any) -> None:
    memory = torch.zeros(100, device=device.torch_device)
    other = torch.ones(20, device=device.torch_device)
    with pytest.raises(InvalidInputError, match=r"^copy_batch takes destinations that do not overlap; two on .* do$"):
        device.memory.copy_batch([memory[0:20], memory[19:39]], [other, other])
    for start in (25, 35, 30, 45):  # a source that ends in, begins in, is, or touches the last of a destination
        source = memory[start : start + 16]
        with pytest.raises(
            InvalidInputError, match=r"^copy_batch takes sources that no destination overlaps; on .* one"
        ):
            device.memory.copy_batch([memory[60:76], memory[30:46]], [other[:16], source])
    device.memory.copy_batch([memory[0:20], memory[20:40], memory[60:76]], [other, memory[40:60], other[:16]])
