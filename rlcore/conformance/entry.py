"""Adds the suite's options to pytest if the command line names the suite; other runs are unchanged.

Pytest reads options from the conftest of given paths, but not from that of packages named by ``--pyargs``.
"""

from __future__ import annotations

import pytest

PACKAGE = "rlcore.conformance"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    modules = [argument.partition("::")[0] for argument in args]
    if any(module == PACKAGE or module.startswith(f"{PACKAGE}.") for module in modules):
        early_config.pluginmanager.import_plugin(f"{PACKAGE}.plugin")
