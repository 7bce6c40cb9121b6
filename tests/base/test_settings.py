"""Every RLCORE_* variable is typed; a wrong value or an unknown name is refused with what is accepted."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from rlcore.errors import InvalidInputError
from rlcore.settings import VARIABLES, Settings


def test_defaults() -> None:
    settings = Settings.from_env({"XDG_CACHE_HOME": "/somewhere", "XDG_RUNTIME_DIR": "/run/user/1"})
    assert settings == Settings(cache=Path("/somewhere/rlcore"), runtime=Path("/run/user/1/rlcore"))
    assert Settings.from_env({}).runtime == Path(tempfile.gettempdir(), f"rlcore-{os.getuid()}")
    assert (settings.device, settings.debug, settings.log_level) == (None, "", "WARNING")
    assert (settings.strict_plugins, settings.disable_plugins) == (False, ())


def test_cache_is_under_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert Settings.from_env({}).cache == Path("/home/someone/.cache/rlcore")


def test_a_user_without_a_home_folder_has_a_cache_in_the_temporary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``env -i`` in a container that runs under a number without an entry in /etc/passwd."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert Settings.from_env({}).cache == Path(tempfile.gettempdir(), f"rlcore-cache-{os.getuid()}")
    assert Settings.from_env({"XDG_CACHE_HOME": "/somewhere"}).cache == Path("/somewhere/rlcore")
    assert Settings.from_env({"RLCORE_CACHE": "/cache"}).cache == Path("/cache")


def test_every_variable_is_read() -> None:
    given = {
        "RLCORE_DEVICE": "cuda:1",
        "RLCORE_DEBUG": "pdb",
        "RLCORE_LOG_LEVEL": "DEBUG",
        "RLCORE_STRICT_PLUGINS": "Yes",
        "RLCORE_DISABLE_PLUGINS": "a, b,,",
        "RLCORE_PROBE_TIMEOUT_S": "2.5",
        "RLCORE_SIMULATED": "1",
        "RLCORE_CACHE": "/cache",
        "RLCORE_RUNTIME": "/runtime",
        "RLCORE_TRACE": "/trace",
        "RLCORE_TRACE_KERNELS": "1",
        "RLCORE_VLLM_PLAIN_WEIGHTS": "1",
    }
    assert set(given) == set(VARIABLES)
    assert Settings.from_env(given) == Settings(
        device="cuda:1",
        debug="pdb",
        log_level="DEBUG",
        strict_plugins=True,
        disable_plugins=("a", "b"),
        probe_timeout_s=2.5,
        simulated=True,
        cache=Path("/cache"),
        runtime=Path("/runtime"),
        trace=Path("/trace"),
        trace_kernels=True,
        vllm_plain_weights=True,
    )


@pytest.mark.parametrize("value", ["0", "false", "No", "off", ""])
def test_flag_can_be_switched_off(value: str) -> None:
    assert not Settings.from_env({"RLCORE_STRICT_PLUGINS": value}).strict_plugins


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RLCORE_DEBUG", "yes", "RLCORE_DEBUG must be one of '', '1', 'pdb', got 'yes'"),
        ("RLCORE_LOG_LEVEL", "loud", "RLCORE_LOG_LEVEL must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR', got 'loud'"),
        ("RLCORE_STRICT_PLUGINS", "maybe", "RLCORE_STRICT_PLUGINS must be 1 or 0, got 'maybe'"),
        ("RLCORE_PROBE_TIMEOUT_S", "soon", "RLCORE_PROBE_TIMEOUT_S must be a number of seconds above 0, got 'soon'"),
        ("RLCORE_PROBE_TIMEOUT_S", "0", "RLCORE_PROBE_TIMEOUT_S must be a number of seconds above 0, got '0'"),
        ("RLCORE_DEVISE", "cpu", "unknown environment variable RLCORE_DEVISE; rlcore reads RLCORE_DEVICE, "),
    ],
)  # fmt: skip
def test_wrong_value_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Settings.from_env({name: value})
    assert str(caught.value).startswith(message)


def test_variables_are_read_when_used_not_when_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_LOG_LEVEL", "ERROR")
    assert Settings.from_env().log_level == "ERROR"
