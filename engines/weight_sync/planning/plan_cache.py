"""Plans that have passed their self-test, on disk: a later program with the same model traces and tests nothing.

A plan is kept under the digest of all that it depends on: rlcore's own code, torch, the trainer's manifest, where the
trainer's ranks are, the layout of the engine's live tensors, and what the target says of its engine (``identity``). If
any of it differs, so does the name of the file. A file that is damaged, or that another user may have written, counts
as none, and the next plan takes its place. Without a folder to trust nothing is kept: the cache only saves time.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlcore import kernels
from rlcore.engines.weight_sync.planning.manifest import WeightManifest
from rlcore.engines.weight_sync.planning.plan import SyncPlan, misfits
from rlcore.engines.weight_sync.target import Target
from rlcore.errors import RlcoreError, one_line
from rlcore.process.runtime_folder import RuntimeFolder
from rlcore.settings import Settings
from rlcore.tensor_data import dtype_name

_log = logging.getLogger(__name__)

_FOLDER = "sync-plans"
_MOST_FILES = 64
"""The oldest go first. The plan of a model with 19,000 weights takes about 2 MB."""
_DIGEST_BYTES = hashlib.sha256().digest_size


class PlanCache:
    """It is the place of one plan in the cache."""

    def __init__(self, name: str) -> None:
        self._name = name

    @staticmethod
    def of(target: Target, manifest: WeightManifest, distances: Sequence[int], number: int) -> PlanCache | None:
        """Return the place of the plan for these; None where the target does not say what its engine is."""
        try:
            identity = target.identity()
        except Exception as error:  # of any kind: it looks at the engine's own objects, and a sync does without it
            _log.warning("this engine's plan is not kept for later programs: %s", one_line(error))
            return None
        if identity is None:
            return None
        parts = [
            _code_digest(), str(torch.__version__), sys.version, identity, manifest.digest, list(distances), number,
            _layouts(target.tensors()),
        ]  # fmt: skip
        return PlanCache(hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest())

    def load(self, manifest: WeightManifest, live: Mapping[str, Tensor]) -> SyncPlan | None:
        """Return the plan, if there is one and it fits the live tensors."""
        with _folder() as folder:
            data = None if folder is None else folder.read(self._name)
        if data is None or hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            return None
        try:
            plan = SyncPlan.from_bytes(data[_DIGEST_BYTES:])
        except RlcoreError:
            return None
        fits = plan.manifest_digest == manifest.digest and not misfits(plan.destinations, live)
        return plan if fits else None

    def store(self, plan: SyncPlan) -> None:
        data = plan.to_bytes()
        with _folder() as folder:
            if folder is None:
                return
            try:
                folder.write(self._name, hashlib.sha256(data).digest() + data)
                for name in sorted(folder.names(), key=folder.modified_s)[:-_MOST_FILES]:
                    folder.remove(name)
            except OSError as error:  # a full disk
                _log.warning("the plan of this weight sync is not kept for later programs: %s", error)


def _folder() -> AbstractContextManager[RuntimeFolder | None]:
    """Open the folder for a block; None where there is none to be trusted."""
    try:
        return closing(RuntimeFolder.open_at(Settings.from_env().cache / _FOLDER, "RLCORE_CACHE"))
    except RlcoreError as error:
        _log.warning("plans of weight syncs are not kept for later programs: %s", error)
        return nullcontext()


@functools.cache
def _code_digest() -> str:
    """Return the digest of the code that makes plans and carries them out: a checkout changes it between releases."""
    folders = [Path(__file__).parent, Path(kernels.__path__[0]) / "strided_copy"]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _layouts(live: Mapping[str, Tensor]) -> list[Any]:
    """Return how the live tensors lie in memory, and which of them share it."""
    firsts: dict[int, int] = {}
    return [
        (name, list(x.shape), list(x.stride()), dtype_name(x.dtype), firsts.setdefault(x.data_ptr(), index))
        for index, (name, x) in enumerate(live.items())
    ]
