"""Loaded by ``-p`` as warm_peers, for engines, in a program that is not warm itself and was started with ``room()``."""

from __future__ import annotations

import importlib
import os

from tests.warm import ENGINES, warm_process

for _name in warm_process.room():
    os.environ.pop(_name)  # its memory stays, for the variables of the forks
for _name in (*ENGINES, "tests.conformance.warm_peers"):
    importlib.import_module(_name)
