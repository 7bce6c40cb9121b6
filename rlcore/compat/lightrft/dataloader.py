"""A rank's part of a dataset, which can begin where an earlier run has ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler


class ResumingSampler(DistributedSampler[Any]):
    """Torch's sampler; its next pass leaves out the samples that all ranks together have consumed already."""

    def __init__(self, dataset: Any, *, consumed_samples: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the order of the next pass, and how many samples it leaves out."""
        super().set_epoch(epoch)
        self._skipped = consumed_samples // self.num_replicas % max(self.num_samples, 1)

    def __len__(self) -> int:
        return self.num_samples - self._skipped

    def __iter__(self) -> Iterator[Any]:
        skipped, self._skipped = self._skipped, 0
        return itertools.islice(super().__iter__(), skipped, None)
