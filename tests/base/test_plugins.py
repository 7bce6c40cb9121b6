"""A broken plugin is recorded, takes nobody down, leaves nothing behind, and is the cause of missing its device.

Every plugin here is a real distribution in a folder of its own, found through its entry point by a new process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.base.conftest import Site, site_with_good_plugin
from tests.warm import run_warm

DEVICE = """
class Device:
    @staticmethod
    def probe(spec):
        return Probe(1)

    def __init__(self, spec, index):
        self.name = spec.name
"""

HANGS = "import time; time.sleep(600)"
PROBE_TIMEOUT_S = 6.0
BRIEF = {"RLCORE_PROBE_TIMEOUT_S": str(PROBE_TIMEOUT_S)}
"""For a probe that hangs beside one that answers at once, and must on a busy machine too."""


def registering(*calls: str) -> str:
    body = "\n    ".join(calls)
    return f"@hookimpl\ndef rlcore_register_devices(register):\n    {body}\n{DEVICE}"


# Name of the plugin and of the device it would give, code, stage that fails, error.
BROKEN = {
    "raises_on_import": ("raise OSError('libacme.so: not found')", "import", "OSError: libacme.so: not found"),
    "exits_on_import": ("import sys; sys.exit('no driver')", "import", "SystemExit: no driver"),
    "ends_at_import": (
        "class Stop(BaseException): pass\nraise Stop('at once')",
        "import",
        "Stop: at once",
    ),
    "unprintable": (
        "class Silent(OSError):\n    def __str__(self): raise self\n    __repr__ = __str__\nraise Silent",
        "import",
        "Silent: <its text cannot be had: Silent>",
    ),
    "colours": ("raise OSError('\x1b[31mred\x1b]0;title\x07')", "import", r"OSError: \x1b[31mred\x1b]0;title\x07"),
    "takes_the_output": (
        registering("import sys; sys.stdout = sys.stderr = None", "raise RuntimeError('in silence')"),
        "register",
        "RuntimeError: in silence",
    ),
    "ends_in_hook": (registering("raise GeneratorExit('half way')"), "register", "GeneratorExit: half way"),
    "needs_missing_module": (
        "import acme_runtime",
        "import",
        "ModuleNotFoundError: No module named 'acme_runtime'",
    ),
    "wrong_hook_name": (
        "@hookimpl\ndef rlcore_register_device(register): ...",
        "validate",
        "unknown hook 'rlcore_register_device'",
    ),
    "wrong_signature": (
        "@hookimpl\ndef rlcore_register_devices(register, priority): ...",
        "validate",
        "Argument(s) {'priority'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "no_hook": (
        "def rlcore_register_devices(register): ...",
        "validate",
        "implements no hook; mark functions named rlcore_register_devices, ",
    ),
    "not_a_spec": (
        registering("register('not_a_spec')"),
        "register",
        "register() takes a DeviceSpec, got str: 'not_a_spec'",
    ),
    "other_major": (
        registering("register(spec('other_major', f'{__name__}:Device', api_version=(2, 0)))"),
        "register",
        "device 'other_major' was written for plugin API 2.0; this rlcore has 1.0. Install a version of the plugin",
    ),
    "newer_minor": (
        registering("register(spec('newer_minor', f'{__name__}:Device', api_version=(1, 1)))"),
        "register",
        "device 'newer_minor' was written for plugin API 1.1; this rlcore has 1.0.",
    ),
    "no_version": (
        registering(
            "register(DeviceSpec(name='no_version', vendor='A', torch_type='cpu', priority=1, "
            "loader='a:B', collective_backend='gloo'))"
        ),
        "register",
        "missing 1 required keyword-only argument: 'api_version'",
    ),
    "takes_cuda": (
        registering("register(spec('cuda', f'{__name__}:Device'))"),
        "register",
        "device 'cuda' is already registered by plugin 'cuda'",
    ),
    "raises_in_hook": (
        registering("register(spec('raises_in_hook', f'{__name__}:Device'))", "raise RuntimeError('half way')"),
        "register",
        "RuntimeError: half way",
    ),
    "cpu": (
        registering("register(spec('cpu2', f'{__name__}:Device'))"),
        "validate",
        "the plugin name 'cpu' belongs to rlcore; choose another",
    ),
}  # fmt: skip


# Field of a spec, value, error.
WRONG_FIELDS = [
    ("name", "'Acme NPU'", "DeviceSpec.name must be lower case letters, digits and '_', got 'Acme NPU'"),
    ("torch_type", "7", "DeviceSpec.torch_type must be lower case letters, digits and '_', got 7"),
    ("priority", "'high'", "DeviceSpec.priority must be a whole number, got 'high'"),
    ("loader", "'acme.Device'", "DeviceSpec.loader must be an import path 'package.module:attribute', got"),
    ("vendor", "None", "DeviceSpec.vendor must be a str that is not empty, got None"),
    ("visible_devices_variable", "5", "DeviceSpec.visible_devices_variable must be str or None, got 5"),
    ("vllm_plugin", "()", "DeviceSpec.vllm_plugin must be str or None, got ()"),
    ("visible_devices_rise", "1", "DeviceSpec.visible_devices_rise must be True or False, got 1"),
    ("program_limits", "{}", "DeviceSpec.program_limits must be ProgramLimits or None, got {}"),
    ("warp_lanes", "64", "DeviceSpec.warp_lanes must be whole numbers such as (32,), got 64"),
    ("warp_lanes", "(0,)", "DeviceSpec.warp_lanes must be whole numbers such as (32,), got (0,)"),
    ("is_host", "'no'", "DeviceSpec.is_host must be True or False, got 'no'"),
    ("api_version", "'1.0'", "DeviceSpec.api_version must be two numbers such as (1, 0), got '1.0'"),
]

# Hook, what is registered by it after a device, error.
WRONG_REGISTRATIONS = [
    ("ops", "register('my_op', '*', 'a.b.c', name='x')", "implementation 'x' of my_op must be an import path"),
    ("ops", "register('my_op', '*', 'a:b', name='x', when='b')", "'when' of implementation 'x' of my_op must be"),
    ("ops", "register('my_op', '*', 'a:b', name='x', priority=None)", "must be a whole number, got None"),
    (
        "ops",
        "register('token_logprob', '*', 'a:b', name='chunked', priority=77)",
        "implementation 'chunked' (priority 77) of token_logprob on '*' clashes with 'chunked'",
    ),
    ("executors", "register('training', 'x', 'a:b')", "executor kind must be one of ('train', 'inference')"),
    ("executors", "register('train', 'fsdp2', 'a:b')", "train executor 'fsdp2' is already registered by plugin"),
    ("benchmarks", "register('a.b')", "benchmark case must be an import path"),
    ("benchmarks", "register('rlcore.bench.cases.startup:cases')", "is already registered"),
]


def with_field(number: int) -> str:
    field, value, _ = WRONG_FIELDS[number]
    arguments = {"name": f"'field_{number}'", "loader": "'a:B'", field: value}
    return registering(f"register(spec(**dict({', '.join(f'{k}={v}' for k, v in arguments.items())})))")


def with_registration(number: int) -> str:
    hook, call, _ = WRONG_REGISTRATIONS[number]
    code = f"@hookimpl\ndef rlcore_register_{hook}(register):\n    {call}\n"
    return registering(f"register(spec('registration_{number}', f'{{__name__}}:Device'))") + code


@pytest.fixture(scope="module")
def beside_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process has registered that finds the good plugin beside every broken one."""
    site = site_with_good_plugin(tmp_path_factory.mktemp("site"))
    for name, (code, _, _) in BROKEN.items():
        site.install(name, code)
    for number in range(len(WRONG_FIELDS)):
        site.install(f"field_{number}", with_field(number))
    for number in range(len(WRONG_REGISTRATIONS)):
        site.install(f"registration_{number}", with_registration(number))
    return site.registered()


def test_broken_plugins_leave_the_good_one_and_nothing_half_registered(beside_all: dict[str, Any]) -> None:
    assert set(beside_all["devices"]) == {"cpu", "cuda", "npu", "good"}
    assert len(beside_all["failed"]) == len([*BROKEN, *WRONG_FIELDS, *WRONG_REGISTRATIONS])


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plugin_is_recorded(beside_all: dict[str, Any], name: str) -> None:
    _, stage, error = BROKEN[name]
    record = dict(beside_all["failed"][name])
    assert error in record.pop("reason")
    assert record == {"name": name, "distribution": f"acme-{name}", "version": "1.2", "stage": stage}
    assert f"plugin '{name}' of acme-{name} 1.2 failed at stage {stage}" in beside_all["log"]


def test_a_single_broken_plugin_is_recorded_and_the_others_work(site: Any) -> None:
    site.install("raises_in_hook", BROKEN["raises_in_hook"][0])
    found = site.registered()
    assert set(found["devices"]) == {"cpu", "cuda", "npu", "good"}
    assert set(found["failed"]) == {"raises_in_hook"}


@pytest.mark.parametrize(
    "name",
    [
        "raises_on_import",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("exits_on_import", "wrong_signature", "raises_in_hook")
        ),
    ],
)
def test_broken_plugin_is_fatal_when_strict(site: Any, name: str) -> None:
    code, stage, error = BROKEN[name]
    site.install(name, code)
    result = site.run("import rlcore; rlcore.list_devices()", RLCORE_STRICT_PLUGINS="1")
    assert result.returncode == 1
    assert f"PluginError: plugin '{name}' of acme-{name} 1.2 failed at stage {stage}: " in result.stderr
    assert error in result.stderr
    assert result.stderr.splitlines()[-1].endswith("(RLCORE_STRICT_PLUGINS=1 makes this fatal)")


@pytest.mark.slow
def test_good_plugins_load_when_strict(site: Any) -> None:
    assert set(site.registered(RLCORE_STRICT_PLUGINS="1")["devices"]) == {"cpu", "cuda", "npu", "good"}


def test_asking_for_a_broken_plugins_device_raises_with_its_error_as_cause(site: Any) -> None:
    causes = {
        "raises_on_import": "OSError: libacme.so",
        "exits_on_import": "SystemExit: no driver",
        "other_major": "PluginError: device 'other_major'",
        "raises_in_hook": "RuntimeError: half way",
    }
    for name in causes:
        site.install(name, BROKEN[name][0])
    result = site.run(f"""
        import rlcore
        for name in {list(causes)}:
            try:
                rlcore.get_device(name)
            except rlcore.RlcoreError as error:
                print(type(error).__name__, type(error.__cause__).__name__, error)
    """)
    for (name, cause), line in zip(causes.items(), result.stdout.splitlines(), strict=True):
        kind = cause.partition(":")[0]
        assert line.startswith(f"DeviceError {kind} device '{name}' is missing because its plugin failed: {cause}"), (
            line
        )


@pytest.mark.slow
def test_the_cause_is_found_when_plugin_and_device_have_different_names(site: Any) -> None:
    code = registering("register(spec('acme_npu', f'{__name__}:Device'))", "raise RuntimeError('half way')")
    site.install("acme", code)
    result = site.run("import rlcore; rlcore.get_device('acme_npu:0')")
    assert (
        "DeviceError: device 'acme_npu' is missing because its plugin failed: RuntimeError: half way" in result.stderr
    )


def test_unknown_device_lists_the_plugins_that_failed(site: Any) -> None:
    site.install("raises_on_import", BROKEN["raises_on_import"][0])
    result = site.run("import rlcore; rlcore.get_device('tpu')")
    assert result.stderr.splitlines()[-1] == (
        "rlcore.errors.DeviceError: no device 'tpu'; registered: cpu, cuda, good, npu "
        "(plugins that failed: raises_on_import). See `rlcore devices`."
    )


BROKEN_PROBES = [
    ("raise OSError('driver too old')", "OSError: driver too old"),
    ("return 1", "PluginError: probe() returned int, not rlcore.types.Probe"),
    ("return Probe('1')", "Probe.count must be a whole number of at least 0, got '1'"),
    ("return Probe(0, 5)", "Probe.reason must be a str, got 5"),
    ("return Probe(0)", "Probe(0) must say the reason why the device is not available"),
    ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    (HANGS, f"TimeoutError: it did not end within {PROBE_TIMEOUT_S:g} s"),
]


def test_broken_probes_make_their_devices_unavailable_with_the_reason(site: Any) -> None:
    for number, (body, _) in enumerate(BROKEN_PROBES):
        code = registering(f"register(spec('sick_{number}', f'{{__name__}}:Device', priority=999))")
        site.install(f"sick_{number}", code.replace("return Probe(1)", body))
    result = site.run(
        f"""
        import rlcore, traceback
        reasons = {{info.name: info.reason for info in rlcore.list_devices()}}
        print(rlcore.get_device().name)
        from rlcore.registry import registry
        print(*sorted((r.name, r.distribution, r.stage) for r in registry().plugins if r.error))
        for number in range({len(BROKEN_PROBES)}):
            print(reasons[f"sick_{{number}}"])
            try:
                rlcore.get_device(f"sick_{{number}}")
            except rlcore.RlcoreError:
                traceback.print_exc()
        """,
        RLCORE_DISABLE_PLUGINS="cpu,cuda,npu",
        **BRIEF,
    )
    default, records, *listed = result.stdout.splitlines()
    assert default == "good:0"  # by priority a sick one would be the default
    assert records == " ".join(f"('sick_{n}', 'acme-sick_{n}', 'probe')" for n in range(len(BROKEN_PROBES)))
    for number, ((_, reason), told) in enumerate(zip(BROKEN_PROBES, listed, strict=True)):
        assert told.startswith("its probe failed: ")
        assert reason in told
        failure = f"plugin 'sick_{number}' of acme-sick_{number} 1.2 failed at stage probe: "
        assert result.stderr.count(failure) == 1
        refusal = f"DeviceError: device 'sick_{number}' is not available here: {told}. See `rlcore devices`."
        assert refusal in result.stderr
    assert result.stderr.count("The above exception was the direct cause") == len(BROKEN_PROBES)


HANGING = registering("register(spec('stuck', f'{__name__}:Device', priority=999))").replace(
    "return Probe(1)", f"print('asked'); {HANGS}"
)


def test_a_hanging_probe_is_asked_once_and_waited_for_once(site: Any) -> None:
    site.install("stuck", HANGING)
    result = site.run(
        """
        import time, rlcore, torch
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            print(rlcore.get_device().name)
            seconds.append(time.perf_counter() - start)
        print(*(info.is_broken for info in rlcore.list_devices() if info.plugin != "declared"))
        print(seconds[0], min(seconds[1:]))
        """,
        **BRIEF,
    )
    *lines, seconds = result.stdout.splitlines()
    assert lines == ["asked", "good:0", "good:0", "good:0", "False False True False False"]  # good, cpu, stuck, ..
    first, later = map(float, seconds.split())
    assert later < PROBE_TIMEOUT_S <= first


def test_plugins_that_hang_are_given_up_and_change_nothing_later(tmp_path: Path) -> None:
    """The second and third one get a tenth of the time, so that many cost little more than one."""
    site = Site(tmp_path)
    site.install("in_import", HANGS)
    for name in ("in_hook", "in_hook_too"):
        first, late = (f"register(spec('{one}', f'{{__name__}}:Device'))" for one in (name, f"{name}_late"))
        site.install(name, registering(first, "import threading; threading.rlcore_go.wait(600)", late))
    result = site.run(
        """
        import threading
        threading.rlcore_go = threading.Event()
        from rlcore.registry import registry
        for record in registry().plugins:
            if record.error:
                print(record.stage, record.reason)
        threading.rlcore_go.set()
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and "load" in thread.name:
                thread.join(1)
        print(*registry().devices)
        """,
        RLCORE_PROBE_TIMEOUT_S="3",
    )
    *failed, devices = result.stdout.splitlines()
    assert sorted(line.split()[0] for line in failed) == ["import", "register", "register"]
    limits = [line.partition(" ")[2] for line in failed]
    assert limits == [f"TimeoutError: it did not end within {seconds} s" for seconds in ("3", "0.3", "0.3")]
    assert devices == "cpu cuda npu"


MEET = "import threading; threading.rlcore_meet.wait(60); "


def test_probes_and_capabilities_of_plugins_are_asked_side_by_side(site: Any) -> None:
    for number in range(3):
        code = registering(f"register(spec('one_{number}', f'{{__name__}}:Device'))")
        body = f"    def capabilities(self):\n        {MEET}return {{}}\n"
        site.install(f"one_{number}", code.replace("return Probe(1)", f"{MEET}return Probe(1)") + body)
    result = site.run(
        """
        import threading
        threading.rlcore_meet = threading.Barrier(3)  # which is passed by three at a time, or fails
        from rlcore.cli.inventory import kinds
        print(*(kind.capabilities for kind in kinds() if kind.info.name.startswith("one_")))
        """,
        RLCORE_PROBE_TIMEOUT_S="100",
    )
    assert result.stdout == "{} {} {}\n", result.stderr


def test_a_device_that_ends_the_process_or_hangs_is_told_with_its_error(site: Any) -> None:
    bodies = {
        "exits": "def __init__(self, spec, index): raise SystemExit('no licence')",
        "exits_later": "properties = capabilities = lambda self: (_ for _ in ()).throw(SystemExit('no licence'))",
        "hangs": f"def __init__(self, spec, index): {HANGS}",
    }
    for name, body in bodies.items():
        site.install(name, registering(f"register(spec('{name}', f'{{__name__}}:Device'))") + f"    {body}\n")
    result = site.run(
        f"""
        from rlcore.cli.inventory import describe, kinds
        from rlcore.doctor.device_process import device
        from rlcore.errors import DeviceError
        told = {{kind.info.name: kind.error for kind in kinds()}}
        for name in {list(bodies)}:
            print(told[name])
            print(device(name).found)
            try:
                describe(name)
            except DeviceError as error:
                print(error)
        """,
        RLCORE_PROBE_TIMEOUT_S="2",
    )
    late = "device 'hangs:0' could not be made: TimeoutError: it did not end within 2 s"
    exits = "device 'exits:0' could not be made: SystemExit: no licence"
    answer = "capabilities() failed: SystemExit: no licence"
    described = "device 'exits_later' cannot be described: SystemExit: no licence"
    lines = result.stdout.splitlines()
    assert lines[:6] == [exits, exits, exits, answer, answer, described], result.stderr
    assert lines[6] in (late, "capabilities() failed: TimeoutError: it did not end within 2 s")  # whichever ends first
    assert lines[7:] == [late, late]


OPERATOR = """
def good(*arguments, **options): ...
def takes_one(a): ...
def serves(query): ...
def raises(query): raise KeyError(1)
"""


def test_operators_of_plugins_are_told_by_the_doctor_and_by_explain(site: Any) -> None:
    line = 'register("{op}", "{device}", f"{{__name__}}:{fn}", name="{name}", priority=99, when=f"{{__name__}}:{when}")'
    fields = {"op": "token_logprob", "device": "*", "fn": "good", "name": "good", "when": "serves"}
    changes: dict[str, dict[str, str]] = {
        "front": {},
        "own": {"op": "linear_loss", "device": "npu"},
        "typo": {"op": "linear_los"},
        "sick": {"op": "gae", "when": "raises"},
        "args": {"op": "linear_logprob", "fn": "takes_one"},
    }
    for name, change in changes.items():
        hook = f"@hookimpl\ndef rlcore_register_ops(register):\n    {line.format(**fields | change)}\n"
        site.install(name, f"{OPERATOR}{hook}")
    code = "from rlcore.doctor.operators import operators as o; v = o(); print(v.status, v.found, v.fix, sep='\\n')"
    status, found, fix = site.run(code).stdout.splitlines()
    assert status == "FAIL"
    assert (
        "the predicate acme_sick:raises of implementation 'good' of gae failed: KeyError: 1. Fix plugin 'sick'" in found
    )
    assert "implementation 'good' of linear_logprob takes (a), and is called with (" in found
    assert "plugin 'typo' implements 'linear_los', which nothing built in calls; did you mean 'linear_loss'?" in found
    before = "before the built-in triton, vocab_parallel, chunked, reference"
    assert f"'good' of plugin 'front' goes {before} of token_logprob on every device" in found
    assert fix == "update or leave out: RLCORE_DISABLE_PLUGINS=args,front,own,sick,typo"
    explain = ["-m", "rlcore", "ops", "explain", "token_logprob", "--device", "cpu"]
    env = {"PYTHONPATH": str(site.folder), "CUDA_VISIBLE_DEVICES": ""}
    assert f"runs, by plugin 'front', {before}" in run_warm(explain, env=env).stdout
    told = json.loads(run_warm([*explain, "--json"], env=env).stdout)
    assert (told["plugin"], told["outranks"]) == ("front", ["triton", "vocab_parallel", "chunked", "reference"])


def test_json_is_all_on_the_output_whatever_a_plugin_prints(site: Any) -> None:
    """By Python, below it, at each moment, at the end, and with the output taken away."""
    loud = "import os, sys; print('python'); os.write(1, b'descriptor')"
    body = registering(f"{loud}", "register(spec('loud', f'{__name__}:Device'))")
    body = body.replace("return Probe(1)", f"{loud}; sys.stdout = None; return Probe(1)")
    code = f"{loud}; import atexit; atexit.register(lambda: os.write(1, b'at exit'))\n{body}"
    site.install("loud", code + f"    def capabilities(self):\n        {loud}\n        return {{}}\n")
    env = {"PYTHONPATH": str(site.folder), "CUDA_VISIBLE_DEVICES": ""}
    result = run_warm(["-m", "rlcore", "devices", "--json"], env=env)
    assert result.returncode == 0, result.stderr
    assert "loud" in [kind["name"] for kind in json.loads(result.stdout)["devices"]]
    assert (result.stderr.count("descriptor"), result.stderr.count("at exit")) == (5, 1)


@pytest.mark.slow
def test_a_slow_probe_is_waited_for(site: Any) -> None:
    code = registering("register(spec('slow', f'{__name__}:Device', priority=999))")
    site.install("slow", code.replace("return Probe(1)", "import time; time.sleep(0.5); return Probe(1)"))
    assert site.run("import rlcore; print(rlcore.get_device().name)", RLCORE_STRICT_PLUGINS="1").stdout == "slow\n"


@pytest.mark.slow
@pytest.mark.parametrize("body", ["raise OSError('driver too old')", HANGS])
def test_a_broken_probe_is_fatal_when_strict(site: Any, body: str) -> None:
    code = registering("register(spec('sick', f'{__name__}:Device'))").replace("return Probe(1)", body)
    site.install("sick", code)
    environment = {"RLCORE_STRICT_PLUGINS": "1"} | (BRIEF if body == HANGS else {})
    result = site.run("import rlcore; rlcore.list_devices()", **environment)
    assert result.returncode == 1
    assert "PluginError: plugin 'sick' of acme-sick 1.2 failed at stage probe: " in result.stderr


def test_a_device_that_cannot_say_what_it_can_do_is_listed_with_the_reason(site: Any) -> None:
    errors = {
        "good": "AttributeError: 'Device' object has no attribute 'capabilities'",
        "none": "PluginError: capabilities() returned NoneType, not a dict",
        "words": "PluginError: capabilities() answered with no Capability for memory.info",
    }
    for name, answer in (("none", "None"), ("words", "{'memory.info': 'native'}")):
        code = registering(f"register(spec('{name}', f'{{__name__}}:Device'))")
        site.install(name, f"{code}    def capabilities(self): return {answer}\n")
    result = site.run(f"""
        from rlcore.cli.inventory import describe, kinds
        found = {{kind.info.name: kind.error for kind in kinds()}}
        for name in {list(errors)}:
            print(found[name])
        describe("none")
    """)
    assert result.stdout.splitlines() == [f"capabilities() failed: {error}" for error in errors.values()]
    assert "rlcore.errors.DeviceError: device 'none' cannot be described: " in result.stderr


@pytest.mark.slow
def test_loader_that_does_not_exist_makes_the_device_unavailable(site: Any) -> None:
    site.install("lost", registering("register(spec('lost', 'acme_lost:Devise'))"))
    result = site.run("import rlcore; rlcore.get_device('lost')")
    assert "device 'lost' is not available here: its probe failed: AttributeError" in result.stderr


@pytest.mark.parametrize("number", range(len(WRONG_FIELDS)), ids=[field for field, _, _ in WRONG_FIELDS])
def test_wrong_field_of_a_spec_is_refused(beside_all: dict[str, Any], number: int) -> None:
    assert WRONG_FIELDS[number][-1] in beside_all["failed"][f"field_{number}"]["reason"]


@pytest.mark.parametrize("number", range(len(WRONG_REGISTRATIONS)))
def test_wrong_registration_is_refused_and_rolled_back(beside_all: dict[str, Any], number: int) -> None:
    failed = beside_all["failed"][f"registration_{number}"]
    assert failed["stage"] == "register"
    assert WRONG_REGISTRATIONS[number][-1] in failed["reason"]
    assert f"registration_{number}" not in beside_all["devices"]


def test_plugin_without_devices_can_register_the_rest(site: Any) -> None:
    site.install(
        "acme",
        """
        @hookimpl
        def rlcore_register_ops(register):
            register("my_op", "*", "math:sqrt", name="plain")

        @hookimpl
        def rlcore_register_executors(register):
            register("inference", "mine", "fractions:Fraction")
        """,
    )
    code = """
        from rlcore.registry import executor_class, registry
        print(executor_class("inference", "mine").__name__, registry().ops["my_op"][0].plugin)
    """
    assert site.run(code, RLCORE_STRICT_PLUGINS="1").stdout == "Fraction acme\n"


@pytest.mark.slow
def test_two_distributions_cannot_share_a_plugin_name(site: Any) -> None:
    site.install("good", registering("register(spec('other', f'{__name__}:Device'))"), distribution="rival")
    found = site.registered()
    assert len(set(found["devices"]) & {"good", "other"}) == 1  # which is found first is up to the file system
    assert "the plugin name 'good' belongs to" in found["failed"]["good"]["reason"]


def test_disabled_plugin_is_not_imported(site: Any) -> None:
    site.install("loud", "print('imported')")
    assert site.run("from rlcore.registry import registry; registry()").stdout == "imported\n"
    found = site.registered(RLCORE_DISABLE_PLUGINS="good, loud")
    assert not found["failed"]
    assert "good" not in found["devices"]
    result = site.run("import rlcore; rlcore.get_device('good')", RLCORE_DISABLE_PLUGINS="good,loud")
    assert "device 'good' is missing because RLCORE_DISABLE_PLUGINS names its plugin" in result.stderr
    assert result.stdout == ""


@pytest.mark.slow
def test_disabling_all_leaves_the_built_in_ones(site: Any) -> None:
    assert set(site.registered(RLCORE_DISABLE_PLUGINS="all")["devices"]) == {"cpu", "cuda", "npu"}


@pytest.mark.slow
def test_built_in_plugin_can_be_disabled(site: Any) -> None:
    assert set(site.registered(RLCORE_DISABLE_PLUGINS="cuda")["devices"]) == {"cpu", "good", "npu"}


@pytest.mark.slow
def test_disabling_an_unknown_plugin_is_said(site: Any) -> None:
    log = site.registered(RLCORE_DISABLE_PLUGINS="goood")["log"]
    assert "RLCORE_DISABLE_PLUGINS names no plugin: goood; there are cpu, cuda, " in log


@pytest.mark.slow
def test_no_device_at_all_is_an_error_that_says_why(site: Any) -> None:
    result = site.run("import rlcore; rlcore.get_device()", RLCORE_DISABLE_PLUGINS="cpu,cuda,npu,good")
    assert "DeviceError: no device is available: none is registered. See `rlcore devices`." in result.stderr
