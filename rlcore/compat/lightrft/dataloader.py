"""A rank's part of a dataset, which can begin where an earlier run has ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler


class ResumingSampler(DistributedSampler[Any]):
    """Torch's sampler; its first pass leaves out the samples that all ranks together have consumed already."""

    def __init__(self, dataset: Any, *, consumed_samples: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._skipped = consumed_samples // self.num_replicas % max(self.num_samples, 1)

    def __iter__(self) -> Iterator[Any]:
        skipped, self._skipped = self._skipped, 0
        return itertools.islice(super().__iter__(), skipped, None)
