"""Import every module of the installed rlcore; optional packages are absent, so each must be imported lazily.

Fails too when a module of the checkout did not reach the installation.
"""

import importlib
import sys
from pathlib import Path

import rlcore

CHECKOUT = Path(__file__).resolve().parent.parent
INSTALLED = Path(rlcore.__file__).resolve().parent
FOLDERS = ("bench", "collectives", "devices", "engines", "kernels")


def module_names(package: Path, prefix: str) -> set[str]:
    parts = (path.relative_to(package).with_suffix("").parts for path in package.rglob("*.py"))
    return {".".join((prefix, *part)).removesuffix(".__init__") for part in parts}


if INSTALLED.is_relative_to(CHECKOUT):
    sys.exit(f"rlcore was imported from the checkout ({INSTALLED}), not from an installation")

expected = module_names(CHECKOUT / "rlcore", "rlcore")
expected |= {name for folder in FOLDERS for name in module_names(CHECKOUT / folder, f"rlcore.{folder}")}
missing = expected - module_names(INSTALLED, "rlcore")
if missing:
    sys.exit(f"not in the installation: {', '.join(sorted(missing))}")

for name in sorted(expected):
    importlib.import_module(name)
print(f"imported {len(expected)} modules from {INSTALLED}")
