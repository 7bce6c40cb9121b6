"""Import every module of the installed rlcore. Optional packages are imported where they are used, so only the
modules named here may need one; once it is installed, they must import too.

Fails too when a module of the checkout did not reach the installation.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import rlcore

CHECKOUT = Path(__file__).resolve().parent.parent
INSTALLED = Path(rlcore.__file__).resolve().parent
NEEDS = {
    "rlcore.bench.pytest_plugin": "pytest",
    "rlcore.engines.sampling.hf.kv_cache": "transformers",
    "rlcore.integrations.transformers": "transformers",
    "rlcore.integrations.trl": "trl",
    "rlcore.integrations.trl_server": "trl",
    "rlcore.integrations.verl.engine": "verl",
    "rlcore.integrations.verl.kernel": "verl",
    "rlcore.integrations.verl.platform": "verl",
    "rlcore.integrations.verl.plugin": "verl",
    "rlcore.integrations.verl.rollout": "verl",
    "rlcore.kernels.linear.rows": "triton",
    "rlcore.kernels.linear.tiled": "triton",
    "rlcore.kernels.linear.tile_budget": "triton",
    "rlcore.packed.attention": "transformers",
    "rlcore.packed.choice": "transformers",
    "rlcore.packed.flash_4": "transformers",
    "rlcore.packed.implementations": "transformers",
    "rlcore.packed.eligibility": "transformers",
}
"""Modules that subclass a class of an optional package, are written in its language, or plug into it."""
FOLDERS = ("bench", "collectives", "devices", "engines", "kernels")


def module_names(package: Path, prefix: str) -> set[str]:
    parts = (path.relative_to(package).with_suffix("").parts for path in package.rglob("*.py"))
    return {".".join((prefix, *part)).removesuffix(".__init__") for part in parts}


if INSTALLED.is_relative_to(CHECKOUT):
    sys.exit(f"rlcore was imported from the checkout ({INSTALLED}), not from an installation")

expected = module_names(CHECKOUT / "rlcore", "rlcore")
expected |= {name for folder in FOLDERS for name in module_names(CHECKOUT / folder, f"rlcore.{folder}")}
from_a_clone = {name for name in expected if name.startswith("rlcore.bench.cases.peers.")}
"""Cases beside other libraries, which the package leaves out."""
expected -= from_a_clone
installed = module_names(INSTALLED, "rlcore")
missing = expected - installed | from_a_clone & installed
if missing:
    sys.exit(f"in the installation or the checkout alone: {', '.join(sorted(missing))}")

NEEDS |= {name: "pytest" for name in expected if name.startswith("rlcore.conformance.")}
NEEDS |= {name: "triton" for name in expected if re.match(r"rlcore\.kernels\.\w+\.triton", name)}
left_out = {name for name, package in NEEDS.items() if importlib.util.find_spec(package) is None}
for name in sorted(expected - left_out):
    importlib.import_module(name)
print(f"imported {len(expected - left_out)} modules from {INSTALLED}; left out: {', '.join(left_out) or 'none'}")
