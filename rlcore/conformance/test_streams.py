"""Order between streams. Where the device runs ahead of the host, a race is provoked first: so a lost wait shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlcore.conformance.work import MB, BusyWork, is_asynchronous
from rlcore.device import Device

ROUNDS = 5


def rounds(device: Device) -> int:
    """Return how many are tried: in one alone the work may be done by itself. A device without queues needs but one."""
    return ROUNDS if is_asynchronous(device) else 1


@pytest.fixture
def busy(device: Device) -> BusyWork:
    return BusyWork.of(device)


Order = Callable[[Any, Any, Any], None]
"""(device, producer, consumer): what is queued on the consumer from now on comes after the producer's work so far."""


def _nothing(device: Device, producer: Any, consumer: Any) -> None:
    pass


def _wait_stream(device: Device, producer: Any, consumer: Any) -> None:
    consumer.wait_stream(producer)


def _wait_event(device: Device, producer: Any, consumer: Any) -> None:
    consumer.wait_event(producer.record_event())


def _event_wait(device: Device, producer: Any, consumer: Any) -> None:
    event = device.streams.event()
    event.record(producer)
    event.wait(consumer)


def _event_wait_of_its_last_record(device: Device, producer: Any, consumer: Any) -> None:
    event = device.streams.event()
    event.record(consumer)
    event.record(producer)
    event.wait(consumer)


def _synchronize_stream(device: Device, producer: Any, consumer: Any) -> None:
    producer.synchronize()


def _synchronize_event(device: Device, producer: Any, consumer: Any) -> None:
    event = device.streams.event()
    event.record(producer)
    event.synchronize()


def _synchronize_device(device: Device, producer: Any, consumer: Any) -> None:
    device.synchronize()


def rounds_in_order(device: Device, busy: BusyWork, order: Order, producer: Any, consumer: Any) -> list[bool]:
    """Return for each round True if the consumer saw what the producer wrote behind a lot of work."""
    value = torch.zeros(MB, device=device.torch_device)
    seen = torch.zeros_like(value)
    found = []
    for number in range(1, rounds(device) + 1):
        device.synchronize()
        producer.synchronize()
        consumer.synchronize()
        with device.streams.use(producer):
            busy.queue()
            value.fill_(number)
        order(device, producer, consumer)
        with device.streams.use(consumer):
            seen.copy_(value)
        consumer.synchronize()
        found.append(bool((seen == number).all().item()))
        producer.synchronize()
    return found


@pytest.mark.covers("streams.new", "streams.use", "streams.event", "identity.synchronize")
@pytest.mark.parametrize("towards", ["a new stream", "the first stream"])
@pytest.mark.parametrize(
    "order",
    [
        *(_wait_stream, _wait_event, _event_wait, _event_wait_of_its_last_record),
        *(_synchronize_stream, _synchronize_event, _synchronize_device),
    ],
    ids=lambda order: order.__name__.strip("_"),
)
def test_what_waits_sees_what_it_waited_for(device: Device, busy: BusyWork, order: Order, towards: str) -> None:
    producer, consumer = device.streams.new(), device.streams.new()
    if towards == "the first stream":
        consumer = device.streams.current()
    is_ahead = is_asynchronous(device)
    if is_ahead:
        unordered = rounds_in_order(device, busy, _nothing, producer, consumer)
        assert not all(unordered), "no race could be provoked without a wait: this test could not see a lost one"
    assert all(rounds_in_order(device, busy, order, producer, consumer))
    if not (is_ahead or device.spec.is_host):
        pytest.skip(f"the host never got ahead of {device.name}: a lost wait would not have been seen")


@pytest.mark.covers("streams.new", "streams.use")
def test_work_on_one_stream_is_done_in_order(device: Device, busy: BusyWork) -> None:
    value = torch.ones(MB, device=device.torch_device)
    device.synchronize()
    stream = device.streams.new()
    with device.streams.use(stream):
        busy.queue()
        for _ in range(20):
            value.mul_(2).add_(1)
    stream.synchronize()
    assert value.max().item() == value.min().item() == 2**21 - 1


READS: dict[str, Callable[[torch.Tensor], float]] = {
    "cpu": lambda value: float(value.cpu().sum()),
    "item": lambda value: value[-1].item() * value.numel(),
    "copy_": lambda value: float(torch.zeros(value.shape).copy_(value).sum()),
}


@pytest.mark.covers("streams.current", "streams.use")
@pytest.mark.parametrize("is_new", [False, True], ids=["the first stream", "a new stream"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_copy_to_the_host_comes_after_the_work_before_it(
    device: Device, busy: BusyWork, read: Callable[[torch.Tensor], float], is_new: bool
) -> None:
    stream = device.streams.new() if is_new else device.streams.current()
    value = torch.zeros(MB, device=device.torch_device)
    device.synchronize()
    for number in range(1, rounds(device) + 1):
        with device.streams.use(stream):
            busy.queue()
            value.fill_(number)
            assert read(value) == number * MB, "the host has read what was there before"


@pytest.mark.covers("streams.current", "streams.use")
@pytest.mark.parametrize("is_new", [False, True], ids=["the first stream", "a new stream"])
def test_a_copy_from_the_host_comes_after_the_work_before_it(device: Device, busy: BusyWork, is_new: bool) -> None:
    stream = device.streams.new() if is_new else device.streams.current()
    value, host = torch.zeros(MB, device=device.torch_device), torch.zeros(MB)
    device.synchronize()
    for number in range(1, rounds(device) + 1):
        with device.streams.use(stream):
            host.fill_(number)
            busy.queue()
            value.fill_(-1)
            value.copy_(host)
            host.fill_(-2)  # the copy has returned
            stream.synchronize()
            assert value.unique().tolist() == [number]


def reads_what_was_there(device: Device, busy: BusyWork, owner: Any, reader: Any, is_recorded: bool) -> bool:
    """Return True if a read behind queued work finds its values, although their memory was freed and reused."""
    seen = torch.zeros(MB, device=device.torch_device)
    device.synchronize()
    with device.streams.use(owner):
        value = torch.ones(MB, device=device.torch_device)
    reader.wait_stream(owner)
    with device.streams.use(reader):
        busy.queue()
        seen.copy_(value)
    if is_recorded:
        value.record_stream(reader)
    del value
    with device.streams.use(owner):
        others = [torch.full((MB,), 9.0, device=device.torch_device) for _ in range(4)]
    device.synchronize()
    assert others[0].max().item() == 9
    return bool((seen == 1).all().item())


@pytest.mark.covers("streams.new", "streams.use")
def test_freed_memory_waits_for_the_stream_that_it_was_recorded_on(device: Device, busy: BusyWork) -> None:
    if not is_asynchronous(device):
        pytest.skip(f"the host never got ahead of {device.name}: what was freed was read before")
    owner, reader = device.streams.new(), device.streams.new()
    if all(reads_what_was_there(device, busy, owner, reader, is_recorded=False) for _ in range(ROUNDS)):
        pytest.skip(f"{device.name} gives freed memory out late: a lost record_stream would not have been seen")
    assert all(reads_what_was_there(device, busy, owner, reader, is_recorded=True) for _ in range(ROUNDS))


@pytest.mark.covers("identity.synchronize", "streams.new")
def test_synchronize_leaves_no_stream_with_work(device: Device, busy: BusyWork) -> None:
    streams = [device.streams.new() for _ in range(3)] + [device.streams.current()]
    for _ in range(rounds(device)):
        for stream in streams:
            with device.streams.use(stream):
                busy.queue()
        device.synchronize()
        assert all(stream.query() for stream in streams)


@pytest.mark.covers("streams.current", "streams.use")
def test_use_sets_the_current_stream_and_puts_the_last_one_back(device: Device) -> None:
    before = device.streams.current()
    stream = device.streams.new()
    with device.streams.use(stream):
        if device.capabilities()["streams.use"].support == "native":
            assert device.streams.current() == stream != before
    assert device.streams.current() == before


@pytest.mark.covers("streams.use")
def test_an_error_inside_use_puts_the_last_stream_back_too(device: Device) -> None:
    before = device.streams.current()
    with pytest.raises(ZeroDivisionError), device.streams.use(device.streams.new()):
        _ = 1 / 0
    assert device.streams.current() == before


@pytest.mark.covers("streams.new")
@pytest.mark.parametrize("priority", [0, -1])
def test_a_stream_of_any_priority_works(device: Device, priority: int) -> None:
    stream = device.streams.new(priority=priority)
    with device.streams.use(stream):
        value = torch.ones(8, device=device.torch_device) * 3
    stream.synchronize()
    assert value.sum().item() == 24


@pytest.mark.covers("streams.new", "streams.use")
def test_a_stream_that_has_work_says_so(device: Device, busy: BusyWork) -> None:
    """The clock tells here if the host is ahead; the other tests ask the stream."""
    stream = device.streams.new()
    was_idle = []
    for _ in range(2 * ROUNDS):
        device.synchronize()
        with device.streams.use(stream):
            busy.finish()
            began = time.perf_counter()
            busy.queue()
            queued, is_idle = time.perf_counter(), stream.query()
            busy.finish()
        if queued - began < (time.perf_counter() - began) / 2:
            was_idle.append(is_idle)
    if len(was_idle) < ROUNDS:  # once it may be because somebody else had the processor
        pytest.skip(f"by the clock the host never got ahead of {device.name}")
    assert not all(was_idle), "query() said that the work was done when it had just begun"


@pytest.mark.covers("streams.event")
def test_an_event_is_reached_when_the_work_before_it_is_done(device: Device, busy: BusyWork) -> None:
    stream = device.streams.new()
    event = device.streams.event()
    was_reached = []
    for _ in range(rounds(device)):
        with device.streams.use(stream):
            busy.queue()
            event.record(stream)
            was_reached.append(event.query())
        event.synchronize()
        assert event.query()
    if is_asynchronous(device):
        assert not all(was_reached), "before the work"


@pytest.mark.covers("streams.event")
def test_elapsed_time_grows_with_the_work_between(device: Device, busy: BusyWork) -> None:
    found = []
    for _ in range(10):  # a machine has others to do too
        short, long = (_milliseconds(device, busy, times) for times in (1, 4))
        found.append((short, long))
        if 0 < 2 * short < long < 8 * short:
            return
    pytest.fail(f"four times the work took, in milliseconds: {found}")


@pytest.mark.covers("streams.event")
def test_elapsed_time_is_in_milliseconds(device: Device, busy: BusyWork) -> None:
    """The host's clock bounds it: both events were seen not to be reached yet, and seen to be reached."""
    measured = []
    for pause_s, times in ((0.1, 0), (0.02, 0), (0.0, 3), (0.0, 1)):
        least, elapsed, most = _bounded(device, busy, pause_s, times)
        assert least <= elapsed <= most, f"by the host's clock between {least} and {most} ms, by events {elapsed} ms"
        measured.append(elapsed)
    assert any(elapsed % 1 for elapsed in measured), f"times are cut to whole milliseconds: {measured}"


@pytest.mark.covers("streams.event")
def test_an_event_has_the_time_of_its_last_record(device: Device, busy: BusyWork) -> None:
    first, second, third = (device.streams.event(timing=True) for _ in range(3))
    stream = device.streams.current()
    first.record(stream)
    second.record(stream)
    busy.queue()
    third.record(stream)
    second.record(stream)
    device.synchronize()
    assert first.elapsed_time(second) >= first.elapsed_time(third) > 0


def _bounded(device: Device, busy: BusyWork, pause_s: float, times: int) -> tuple[float, float, float]:
    """Return the least that two events may tell in milliseconds, what they tell, and the most.

    Between them are a pause of the host, and work.
    """
    begin, end = device.streams.event(timing=True), device.streams.event(timing=True)
    stream = device.streams.current()
    device.synchronize()
    before_begin = time.perf_counter()
    begin.record(stream)
    begin.synchronize()
    after_begin = time.perf_counter()
    time.sleep(pause_s)
    busy.queue(times)
    before_end = time.perf_counter()
    end.record(stream)
    while (now := time.perf_counter()) and not end.query():
        before_end = now
    end.synchronize()
    after_end = time.perf_counter()
    slack_s = 1e-4 + (after_end - before_begin) / 1000  # when the host sees an event, and clocks that run apart
    return (
        (before_end - after_begin - slack_s) * 1000,
        float(begin.elapsed_time(end)),
        (after_end - before_begin + slack_s) * 1000,
    )


def _milliseconds(device: Device, busy: BusyWork, times: int) -> float:
    begin, end = device.streams.event(timing=True), device.streams.event(timing=True)
    stream = device.streams.current()
    begin.record(stream)
    busy.queue(times)
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end))
