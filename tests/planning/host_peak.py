"""The most memory of the host that torch's allocator gave while a profile ran."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile


def started() -> profile:
    """Return a profile of the host's memory, which runs until ``stopped``."""
    found = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    found.start()
    return found


def stopped(running: profile) -> int:
    """End a profile; return the most bytes that the allocator gave meanwhile and had not got back."""
    running.stop()
    waiting, sizes = list(running.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    held = peak = 0
    for _, size in sorted(sizes):
        held += size
        peak = max(peak, held)
    return peak
