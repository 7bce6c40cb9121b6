"""The number of threads with which torch computes on the host, here and in worker processes.

The quickstart's own model, and any as small, takes one: in steps so small, more threads wait for each other. On a host
that others use, two of them take three times the processor time of one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def host_threads(number: int) -> Iterator[None]:
    """Let torch compute with ``number`` threads on the host, here and in worker processes that start meanwhile."""
    before, of_workers = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(number)
    os.environ["OMP_NUM_THREADS"] = str(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        del os.environ["OMP_NUM_THREADS"]
        os.environ |= {} if of_workers is None else {"OMP_NUM_THREADS": of_workers}
