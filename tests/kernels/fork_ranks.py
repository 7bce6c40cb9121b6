"""Runs files of tests once for each rank: ``python fork_ranks.py SIZE FOLDER FILE...``.

The folder gets what each one says.

Processes are forked from one that has torch: to import what the tests need takes longer than the tests.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch.distributed.fsdp
import torch.distributed.tensor.debug  # noqa: F401  # nothing of rlcore: pytest wants to be the first to import that


def run_rank(tests: list[str], rank: int, size: int, folder: Path) -> int:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), TEST_STORE=str(folder / "store"))
    with (folder / f"rank{rank}").open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    return int(pytest.main(["-v", "-x", "-p", "no:cacheprovider", *tests]))


def forked(tests: list[str], rank: int, size: int, folder: Path) -> int:
    """Return the id of the process that runs a rank."""
    if child := os.fork():
        return child
    status = 1
    try:
        status = run_rank(tests, rank, size, folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main(size: int, folder: Path, tests: list[str]) -> int:
    running = {forked(tests, rank, size, folder) for rank in range(size)}
    while running:
        process, status = os.wait()
        running.remove(process)
        if status:  # the others would wait for it
            for other in running:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
