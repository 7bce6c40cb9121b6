"""Loaded by ``-p`` in a program that is not warm itself: as warm_peers, with what engines import."""

from __future__ import annotations

import importlib

from tests.warm import ENGINES

for _name in (*ENGINES, "tests.conformance.warm_peers"):
    importlib.import_module(_name)
