"""Adds the suite's options to pytest when the command line names the suite, and nothing to any other run.

Pytest reads options from a conftest of paths that it is given, but not of packages named by ``--pyargs``.
"""

from __future__ import annotations

import pytest

PACKAGE = "rlcore.conformance"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    modules = [argument.partition("::")[0] for argument in args]
    if any(module == PACKAGE or module.startswith(f"{PACKAGE}.") for module in modules):
        early_config.pluginmanager.import_plugin(f"{PACKAGE}.plugin")
