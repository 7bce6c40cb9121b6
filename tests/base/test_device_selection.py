"""Which device ``get_device`` returns, and what it refuses."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import rlcore
from rlcore.errors import DeviceError, InvalidInputError


def test_default_is_the_available_accelerator_of_highest_priority(site: Any) -> None:
    # "good" has priority 50; the built-in cpu has 0.
    assert site.run("import rlcore; print(rlcore.get_device().name)").stdout == "good:0\n"


@pytest.mark.slow
def test_default_is_the_cpu_without_an_accelerator(site: Any) -> None:
    code = "import rlcore; print(rlcore.get_device().name)"
    assert site.run(code, RLCORE_DISABLE_PLUGINS="good").stdout == "cpu:0\n"


def test_list_has_available_devices_first_by_priority(site: Any) -> None:
    code = "import rlcore; print(*((i.name, i.is_available) for i in rlcore.list_devices()))"
    printed = site.run(code).stdout
    assert printed.startswith("('good', True) ('cpu', True) ('cuda', False) ('npu', False) ('rocm', False) ")


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_name_index_and_torch_device_find_the_same_object(name: str | torch.device) -> None:
    assert rlcore.get_device(name) is rlcore.get_device("cpu")


@pytest.mark.slow
def test_index_binds_the_device(site: Any) -> None:
    assert site.run("import rlcore; print(rlcore.get_device('good:1').name)").stdout == "good:1\n"


def test_environment_chooses_the_default(monkeypatch: pytest.MonkeyPatch, site: Any) -> None:
    code = "import rlcore; print(rlcore.get_device().name, rlcore.get_device('good').name)"
    assert site.run(code, RLCORE_DEVICE="cpu").stdout == "cpu:0 good:0\n"
    assert site.run(code, RLCORE_DEVICE="good:1").stdout == "good:1 good:0\n"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("tpu", "RLCORE_DEVICE=tpu: no device 'tpu'; registered: cpu, cuda"),
        ("cpu:4000", "RLCORE_DEVICE=cpu:4000: device 'cpu:4000' does not exist; cpu has "),
    ],
)
def test_wrong_environment_is_never_replaced(monkeypatch: pytest.MonkeyPatch, wanted: str, message: str) -> None:
    monkeypatch.setenv("RLCORE_DEVICE", wanted)
    with pytest.raises(DeviceError) as caught:
        rlcore.get_device()
    assert str(caught.value).startswith(message)


def test_malformed_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DEVICE", "cpu:first")
    with pytest.raises(InvalidInputError, match=r"RLCORE_DEVICE=cpu:first: a device is 'name' or 'name:index'"):
        rlcore.get_device()


def test_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(DeviceError, match=r"^no device 'tpu'; registered: cpu, cuda.* See `rlcore devices`\.$"):
        rlcore.get_device("tpu")
    with pytest.raises(DeviceError, match=r"^no device ''; registered: "):
        rlcore.get_device("")
    with pytest.raises(DeviceError, match=r"^no device 'meta'; registered: "):
        rlcore.get_device(torch.device("meta"))


def test_device_that_is_not_there_says_why(site: Any) -> None:
    result = site.run("import rlcore; rlcore.get_device('cuda')")
    assert "DeviceError: device 'cuda' is not available here: " in result.stderr
    assert "See `rlcore devices`." in result.stderr


@pytest.mark.slow
def test_index_past_the_last_is_refused(site: Any) -> None:
    result = site.run("import rlcore; rlcore.get_device('good:2')")
    assert "DeviceError: device 'good:2' does not exist; good has 2: 0 to 1" in result.stderr


@pytest.mark.parametrize("name", ["cpu:", "cpu:-1", "cpu:x", "cpu:0:0"])
def test_malformed_index_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"a device is 'name' or 'name:index', such as 'cuda:1'; got '{name}'"):
        rlcore.get_device(name)


@pytest.mark.parametrize("name", [0, b"cpu", {"cpu"}, torch.ones(1), ["cpu"]], ids=repr)
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        rlcore.get_device(name)
    accepted = "a device is a name such as 'cuda' or 'cuda:1', a torch.device, or None for the default one; got "
    assert str(caught.value) == f"{accepted}{type(name).__name__}: {name!r}"


def test_a_device_that_cannot_be_made_says_whose_and_why(site: Any) -> None:
    code = """
        @hookimpl
        def rlcore_register_devices(register):
            register(spec("clumsy", f"{__name__}:Device"))

        class Device:
            @staticmethod
            def probe(spec):
                return Probe(1)
    """
    site.install("clumsy", code)
    result = site.run("import rlcore; rlcore.get_device('clumsy')")
    assert "DeviceError: device 'clumsy:0' could not be made: TypeError: Device() takes no arguments" in result.stderr


def test_looking_a_device_up_takes_a_few_calls_of_nothing(times_as_long: Any) -> None:
    rlcore.get_device("cpu:1")
    assert times_as_long(lambda: rlcore.get_device("cpu:1"), lambda: None) < 20


def test_looking_the_default_up_takes_little_more_than_a_look_at_the_environment(times_as_long: Any) -> None:
    rlcore.get_device()
    assert times_as_long(rlcore.get_device, lambda: os.environ.get("RLCORE_DEVICE")) < 5


def test_the_default_follows_the_environment_and_nothing_else(site: Any) -> None:
    code = """
        import os, rlcore
        from rlcore.types import Probe
        names = [rlcore.get_device().name]
        import acme_good
        acme_good.Device.probe = staticmethod(lambda spec: Probe(0, "it was unplugged"))
        names.append(rlcore.get_device().name)
        os.environ["RLCORE_DEVICE"] = "cpu:2"
        names.append(rlcore.get_device().name)
        del os.environ["RLCORE_DEVICE"]
        names.append(rlcore.get_device().name)
        print(*names)
    """
    assert site.run(code).stdout == "good:0 good:0 cpu:2 good:0\n"


@pytest.mark.slow
def test_a_default_that_was_not_there_is_looked_for_again(site: Any) -> None:
    code = """
        import rlcore
        from rlcore.errors import DeviceError
        from rlcore.types import Probe
        import acme_good
        there, acme_good.Device.probe = acme_good.Device.probe, staticmethod(lambda spec: Probe(0, "still starting"))
        try:
            rlcore.get_device()
        except DeviceError as error:
            print(error)
        acme_good.Device.probe = there
        print(rlcore.get_device().name)
    """
    lines = site.run(code, RLCORE_DEVICE="good").stdout.splitlines()
    assert "RLCORE_DEVICE=good: device 'good' is not available here: still starting" in lines[0]
    assert lines[1] == "good:0"
