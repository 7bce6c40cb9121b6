"""The command as its users and their scripts see it: output, exit code, errors in one line."""

from __future__ import annotations

import errno
import gc
import inspect
import io
import json
import math
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import rlcore
from rlcore.bench.measurement.isolated import Isolated
from rlcore.bench.measurement.measure import run_case
from rlcore.bench.measurement.system import new_record
from rlcore.bench.record import Calibration, CaseResult, read
from rlcore.cli import main as cli
from rlcore.cli.console import print_json
from rlcore.errors import RlcoreError
from rlcore.registry import get_device
from tests.warm import warm

Run = Callable[..., "subprocess.CompletedProcess[str]"]

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
ANSI = re.compile(r"\x1b\[")


@pytest.fixture
def rlcore_command(run_python: Any) -> Run:
    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        result: subprocess.CompletedProcess[str] = run_python(["-m", "rlcore", *arguments], **options)
        return result

    return run


def assert_is_one_line_error(result: subprocess.CompletedProcess[str], text: str) -> None:
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"rlcore: {text}"), result.stderr
    assert len(result.stderr.splitlines()) == 1


# ---------------------------------------------------------------------------------------------- what is printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["version", "--json"], {"rlcore": rlcore.__version__, "python": ".".join(map(str, sys.version_info[:3]))}),
        (["ops", "explain", "linear_loss", "--device", "cpu", "--json"], {"op": "linear_loss"}),
        (["devices", "--json"], {"failed_plugins": []}),
    ],
)
def test_json_is_all_there_is_on_stdout(rlcore_command: Run, arguments: list[str], expected: dict[str, Any]) -> None:
    result = rlcore_command(*arguments, env={"RLCORE_LOG_LEVEL": "DEBUG"})
    assert result.returncode == 0, result.stderr
    assert expected.items() <= json.loads(result.stdout).items()


def test_json_has_null_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"noise": math.inf, "rows": [{"p": math.nan}, (-math.inf, 1.5)], "is": True}
    print_json(found)
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "noise": None, "rows": [{"p": None}, [None, 1.5]], "is": True,
    }  # fmt: skip


def test_devices_as_json_holds_every_device_with_its_capabilities(rlcore_command: Run) -> None:
    found = json.loads(rlcore_command("devices", "--json", env={"CUDA_VISIBLE_DEVICES": ""}).stdout)
    cpu, cuda, npu, *declared = found["devices"]
    told = {(one["plugin"], one["is_available"], one["capabilities"]) for one in declared}
    assert told == {("declared", False, None)}
    assert (npu["ray_resource"], npu["count"]) == ("NPU", 0)
    assert cpu.pop("count") >= 8, "slots for worker processes"
    capabilities = cpu.pop("capabilities")
    assert {how["support"] for how in capabilities.values()} <= {"native", "emulated", "unsupported"}
    assert capabilities["memory.info"] == {"support": "native", "evidence": "hardware", "reason": ""}
    assert cpu == {
        "name": "cpu",
        "vendor": "host",
        "is_available": True,
        "reason": "",
        "plugin": "cpu",
        "is_broken": False,
        "visible_devices_variable": None,
        "visible_devices": None,
        "ray_resource": "CPU",
        "error": "",
    }
    assert (cuda["name"], cuda["is_available"], cuda["capabilities"]) == ("cuda", False, None)
    assert (cuda["visible_devices_variable"], cuda["visible_devices"]) == ("CUDA_VISIBLE_DEVICES", [])
    assert cuda["reason"]


def test_devices_with_a_name_shows_every_member(rlcore_command: Run) -> None:
    found = json.loads(rlcore_command("devices", "cpu:1", "--json").stdout)
    assert (found["name"], found["vendor"]) == ("cpu:1", "host")
    assert found["simulation"] is None
    assert found["properties"]["cores"] == len(os.sched_getaffinity(0))
    table = rlcore_command("devices", "cpu:1").stdout
    for member, how in found["capabilities"].items():
        assert re.search(
            rf"^ ?{re.escape(member)} +{how['support']} +{how['evidence']} *{re.escape(how['reason'])}", table, re.M
        )
    assert str(found["properties"]["total_bytes"]) in table


@pytest.mark.slow
def test_log_goes_to_stderr(rlcore_command: Run) -> None:
    arguments = ["ops", "explain", "token_logprob", "--device", "cpu"]
    quiet = rlcore_command(*arguments)
    loud = rlcore_command(*arguments, env={"RLCORE_LOG_LEVEL": "INFO"})
    assert quiet.stderr == ""
    assert "INFO rlcore.kernels.dispatch: token_logprob for bfloat16 on cpu runs as 'chunked'" in loud.stderr
    assert loud.stdout == quiet.stdout


def test_version_table_names_what_is_installed(rlcore_command: Run) -> None:
    table = rlcore_command("version").stdout
    assert re.search(rf"\brlcore +{re.escape(rlcore.__version__)}\b", table)
    assert re.search(r"\btorch +\d+\.\d+", table)
    asked = rlcore_command("--version")
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, table, "")


def test_explain_says_why_the_others_do_not_run() -> None:
    arguments = ["ops", "explain", "linear_logprob", "--device", "cpu", "--option", "memory_budget"]
    result = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).stdout)
    refused = {entry["implementation"]: entry["reason"] for entry in result["refused"]}
    assert result["implementation"] == "chunked"
    assert refused["reference"] == "it holds all logits at once, so it cannot keep a memory budget"
    table = CliRunner().invoke(cli.app, arguments).stdout
    assert re.search(r"chunked +runs", table)
    assert re.search(f"reference +{refused['reference']}", table)


def test_pipe_gets_whole_lines_without_colour(rlcore_command: Run) -> None:
    result = rlcore_command("devices", env={"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "40"})
    assert not ANSI.search(result.stdout)
    (line,) = [line for line in result.stdout.splitlines() if "cuda" in line]
    assert "install a CUDA build of torch" in line or "hides all GPUs from this process" in line


@pytest.mark.parametrize(("env", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_terminal_gets_colour_unless_it_is_refused(env: dict[str, str], has_colour: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    ours, theirs = pty.openpty()
    command = [*warm(), "-m", "rlcore", "devices"]
    subprocess.run(command, stdout=theirs, env=environment | {"TERM": "xterm-256color"} | env, timeout=120, check=True)
    os.close(theirs)
    output = b""
    while chunk := _read_or_end(ours):
        output += chunk
    os.close(ours)
    assert bool(re.search(rb"\x1b\[[0-9;]*3[0-9]", output)) == has_colour, output
    assert b"available" in output


def _read_or_end(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:  # Linux's way to say that the other side of the terminal is closed
        return b""


# -------------------------------------------------------------------------------------------------- exit code


def test_wrong_usage_exits_with_2(rlcore_command: Run) -> None:
    """tests/cli/test_wrong_calls.py has all that can be wrong."""
    result = rlcore_command("devices", "--jsn")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Error" in result.stderr and "--jsn" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["devices", "tpu"], "no device 'tpu'; registered: cpu, cuda"),
        (["devices", "cuda"], "device 'cuda' is not available here: "),
    ],
)
def test_error_of_rlcore_is_one_line_and_exits_with_1(rlcore_command: Run, arguments: list[str], error: str) -> None:
    result = rlcore_command(*arguments, env={"CUDA_VISIBLE_DEVICES": ""})
    assert_is_one_line_error(result, error)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["ops", "explain", "matmul"], "no operator 'matmul'; registered: "),
        (["ops", "explain", "linear_loss", "--dtype", "bf16"], "--dtype must be one of float32, bfloat16"),
        (["ops", "explain", "linear_loss", "--device", "tpu"], "no device 'tpu'; registered: cpu, cuda"),
        (["ops", "explain", "linear_loss", "--implementation", "magic"], "linear_loss has no implementation 'magic'"),
        (["bench", "run", "kernel"], "no benchmark case 'kernel'; did you mean kernels "),
        (["bench", "run", "dispatch", "-o", "/tmp"], "cannot write the benchmark record /tmp: it is a folder"),
        (["bench", "run", "dispatch", "-o", "/nowhere/x.json"], "cannot write the benchmark record /nowhere/x.json"),
    ],
)
def test_what_is_refused_is_said_why(arguments: list[str], error: str) -> None:
    found = CliRunner().invoke(cli.app, arguments)
    assert isinstance(found.exception, RlcoreError)
    assert str(found.exception).startswith(error)


def test_a_wrong_option_after_json_gives_the_standard_output_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at a later collection of garbage, amid another command."""
    gc.disable()
    try:
        assert CliRunner().invoke(cli.app, ["doctor", "--json", "extra"]).exit_code == 2
        later = io.StringIO()
        monkeypatch.setattr("sys.stdout", later)
    finally:
        gc.enable()
    gc.collect()
    assert sys.stdout is later


def test_wrong_environment_is_one_line_and_exits_with_1(rlcore_command: Run) -> None:
    result = rlcore_command("version", env={"RLCORE_LOG_LEVEL": "loud"})
    assert_is_one_line_error(result, "RLCORE_LOG_LEVEL must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR', got 'loud'")


def test_error_that_is_not_ours_keeps_its_traceback(run_python: Any) -> None:
    code = "@cli.app.command()\ndef broken(): 1 / 0\nsys.argv[1:] = ['broken']; cli.main()"
    result = run_python(f"import sys\nfrom rlcore.cli import main as cli\n{code}")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def told(monkeypatch: pytest.MonkeyPatch, command: str) -> str:
    """Return what ``rlcore COMMAND`` writes at its end."""
    monkeypatch.setattr(sys, "argv", ["rlcore", *shlex.split(command)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return str(ended.value.code)


@pytest.mark.parametrize("command", ["checkpoint verify {}", "examples {}", "trace -o {} true", "plan {}"])
def test_a_path_that_is_too_long_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
    found = told(monkeypatch, command.format(tmp_path / ("x" * 300)))
    assert found.startswith("rlcore: ") and "xxx" in found and "File name too long" in found
    assert len(found.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "give a path that you may use, or let its owner change the permissions"),
        (errno.EISDIR, "give a file"),
        (errno.ENOTTY, "give another path"),
    ],
)
@pytest.mark.parametrize("path", ["a\x1bb", b"a\x1bb"])
def test_an_error_of_the_system_about_a_path_is_one_line(
    monkeypatch: pytest.MonkeyPatch, number: int, advice: str, path: Any
) -> None:
    def fails() -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr("rlcore.cli.main._run", fails)
    assert told(monkeypatch, "version") == f"rlcore: a\\x1bb: {os.strerror(number)}; {advice}"


class Unwritable(io.StringIO):
    """As a file on a full disk, or a pipe that nobody reads: what is written fails when it leaves the buffer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(
    ("stdout", "code"),
    [
        (
            Unwritable(errno.ENOSPC),
            "rlcore: cannot write the result to standard output: No space left on device; what is there is not whole",
        ),
        (Unwritable(errno.EPIPE), 1),
        (None, None),  # closed
    ],
    ids=["full", "read by nobody", "closed"],
)
def test_a_standard_output_that_takes_nothing_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, stdout: Any, code: Any
) -> None:
    for arguments in (["bench", "list"], ["bench", "list", "--json"], ["version"]):
        monkeypatch.setattr(sys, "argv", ["rlcore", *arguments])
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", io.StringIO())  # typer replaces it where nobody reads
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or None) == code
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.close()


def test_help_names_every_command(rlcore_command: Run) -> None:
    text = rlcore_command("--help").stdout
    commands = ("quickstart", "examples", "devices", "doctor", "ps", "version", "bench", "checkpoint", "ops")
    assert [name for name in commands if name not in text] == []
    assert text.isascii() and "\x1b" not in text, "a pipe gets no boxes"


# ------------------------------------------------------------------------------------------------------- bench


def test_bench_list_without_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.torch_import._failure", lambda: ImportError("libtorch.so: not here"))
    found = CliRunner().invoke(cli.app, ["bench", "list"])
    assert (found.exit_code, found.stdout) == (1, "")
    told = "import torch failed: ImportError: libtorch.so: not here; `rlcore doctor` says what to do"
    assert str(found.exception) == told


def test_bench_list_names_the_cases() -> None:
    cases = json.loads(CliRunner().invoke(cli.app, ["bench", "list", "--json"]).stdout)
    assert {"dispatch/device", "kernels/linear_loss/8b", "startup/import"} <= {case["name"] for case in cases}
    assert "clipped policy loss" in CliRunner().invoke(cli.app, ["bench", "list"]).stdout


@pytest.fixture
def bench_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """``rlcore bench`` in an empty folder, with cases in this process; tests/bench/test_isolated.py runs the others."""
    device, limits = get_device("cpu"), Calibration(measured_at=datetime.now(UTC).isoformat(), limits={})
    monkeypatch.setattr(Isolated, "new_record", lambda self, effort: new_record(device, effort))
    monkeypatch.setattr(Isolated, "calibrate", lambda self, effort: limits)
    monkeypatch.setattr(Isolated, "run_case", lambda self, case, sampling, left_s: run_case(case, device, sampling))
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    return lambda *arguments: CliRunner().invoke(cli.app, ["bench", *arguments], catch_exceptions=False)


def test_bench_run_writes_the_record_and_says_where(bench_here: Callable[..., Result]) -> None:
    arguments = ["-o", "out.json", "--device", "cpu", "--json", "--quick", "--note", "others use it"]
    result = bench_here("run", "dispatch", *arguments)
    assert result.exit_code == 0, result.stderr
    assert Path("out.json").read_text() == result.stdout
    assert result.stderr.splitlines()[-1] == "out.json"
    record = read(Path("out.json"))
    names = ("dispatch/device", "dispatch/op", "dispatch/op_new")
    assert {(case.name, case.status) for case in record.cases} == {(name, "pass") for name in names}
    assert record.system.hw_notes == "others use it"


def test_bench_run_without_a_file_names_one_after_device_and_time(bench_here: Callable[..., Result]) -> None:
    result = bench_here("run", "dispatch/op", "--device", "cpu", "--quick")
    (file,) = Path().iterdir()
    assert re.match(r"1 case on cpu:0, about \d+ min \(quick\)$", result.stderr.splitlines()[0])
    assert re.fullmatch(r"rlcore-bench-cpu-\d{8}T\d{6}Z\.json", file.name)
    assert result.stderr.splitlines()[-1] == file.name
    assert re.search(r"dispatch/op +dispatch +pass +[\d.]+ [nµ]s +25", result.stdout)


def test_bench_run_interrupted_before_the_first_case_leaves_an_earlier_file_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Isolated, "new_record", interrupt)
    file = tmp_path / "out.json"
    file.write_text("of another run")
    found = CliRunner().invoke(cli.app, ["bench", "run", "dispatch/op", "--device", "cpu", "-o", str(file), "--force"])
    assert found.exit_code != 0
    assert "1 case on cpu:0" in found.stderr and "--continue" not in found.stderr
    assert file.read_text() == "of another run"


@pytest.mark.parametrize("command", [["run", "dispatch/op", "--device", "cpu"], ["report", "a.json"]])
def test_a_file_that_is_there_is_replaced_only_if_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(RESULTS / "startup-cpu.json", "a.json")
    Path("mine").write_text("years of work")
    found = CliRunner().invoke(cli.app, ["bench", *command, "-o", "mine"])
    others = "--continue to go on with it, " if command[0] == "run" else ""
    assert str(found.exception) == f"-o mine exists; give another file, or {others}--force to replace it"
    assert Path("mine").read_text() == "years of work"


@pytest.mark.parametrize("name", ["a.json", "./a.json", "link", "hard link"])
def test_a_report_never_takes_the_place_of_its_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(RESULTS / "startup-cpu.json", "a.json")
    Path("link").symlink_to("a.json")
    os.link("a.json", "hard link")
    before = Path("a.json").read_bytes()
    found = CliRunner().invoke(cli.app, ["bench", "report", "a.json", "-o", name, "--force"])
    assert str(found.exception) == f"-o {Path(name)} is one of the records; give another file for the page"
    assert Path("a.json").read_bytes() == before
    found = CliRunner().invoke(cli.app, ["bench", "report", "a.json", "-o", "page.html"])
    assert found.exit_code == 0 and Path("page.html").read_text().startswith("<!doctype html>")
    Path("page.html").write_text("an older one")
    assert CliRunner().invoke(cli.app, ["bench", "report", "a.json", "-o", "page.html", "--force"]).exit_code == 0
    assert Path("page.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])  # as a terminal does; as `timeout` does
def test_interrupted_bench_run_keeps_what_is_done_and_exits_with_130(end: signal.Signals, tmp_path: Path) -> None:
    file, cache = tmp_path / "out.json", {"RLCORE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "rlcore", "bench", "run", "dispatch/op", "startup", "-o", str(file), "--quick"]
    options = {"env": os.environ | cache, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **options) as process:
        deadline = time.monotonic() + 200
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, end)
        _, log = process.communicate(timeout=60)
    # Python ends by the signal, which a shell reports as 130 too, where an interrupt came in code that was given as
    # text: that of a dataclass or a named tuple, in a module that is just imported.
    assert process.returncode in (130, -signal.SIGINT), log
    assert "Traceback" not in log
    told = "interrupted; with --continue the same command does the rest"
    assert log.splitlines()[-2:] == [told, str(file)]
    cases = {case.name: case for case in read(file).cases}
    assert cases["dispatch/op"].status == "pass"
    assert (cases["startup/import"].status, cases["startup/import"].reason) == ("skipped", "the run was interrupted")


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ([], r"-o (rlcore-bench-cpu-\w+\.json) --continue"),
        (["-o", "mine.json"], "--continue"),
        (["-o", "mine.json", "--force"], "--continue instead of --force"),
    ],
)
@pytest.mark.slow
def test_what_does_the_rest_of_an_interrupted_run_is_a_command_that_does_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], how: str
) -> None:
    def interrupted(self: Isolated, *_: object) -> list[CaseResult]:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "cache"))
    command = ["bench", "run", "dispatch/op", "--device", "cpu", "--quick"]
    with monkeypatch.context() as patch:
        patch.setattr(Isolated, "run_case", interrupted)
        found = CliRunner().invoke(cli.app, [*command, *options])
    told = re.search(rf"^interrupted; with {how} the same command does the rest\n(.*)\n", found.stderr, re.MULTILINE)
    assert told, found.stderr
    assert [result.status for result in read(Path(told.groups()[-1])).cases] == ["skipped"]
    rest = ["-o", told.groups()[-1], "--continue"]
    assert CliRunner().invoke(cli.app, [*command, *rest]).exit_code == 0
    assert [result.status for result in read(Path(told.groups()[-1])).cases] == ["pass"]


# -------------------------------------------------------------------------------------------------- quickstart


def test_quickstart_options_are_the_fields_of_its_config() -> None:
    from rlcore.quickstart.config import QuickstartConfig

    parameters = inspect.signature(cli.quickstart, eval_str=True).parameters
    usual = {field.name: field.default for field in fields(QuickstartConfig) if field.name != "simulation"}  # found
    assert parameters.keys() == usual.keys()
    for name, parameter in parameters.items():
        (option,) = parameter.annotation.__metadata__
        told = option.show_default if isinstance(option.show_default, str) else parameter.default
        assert told in (str(usual[name]), usual[name] or None, usual[name]), name


def test_quickstart_resumes_with_the_options_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rlcore.quickstart.config import QuickstartConfig

    asked: list[QuickstartConfig] = []
    monkeypatch.setattr("rlcore.quickstart.run.run", lambda config: asked.append(config) or 0)
    model = QuickstartConfig(model=Path("/m"), device="cpu", seed=3, steps=7, output=tmp_path, shuffle_rewards=True)
    (tmp_path / "run.json").write_bytes(model.to_json())
    for options in ([], ["--steps", "9"], ["--model", "m", "--seed", "0"]):
        command = ["quickstart", "--resume", "--output", str(tmp_path), *options]
        assert CliRunner().invoke(cli.app, command).exit_code == 0
    first = replace(model, resume=True)
    assert asked == [first, replace(first, steps=9), replace(first, model=Path.cwd() / "m", seed=0)]


def test_quickstart_exits_with_the_code_of_its_run(run_python: Any, tmp_path: Path) -> None:
    code = """
import sys, types
sys.modules["rlcore.quickstart.run"] = stand_in = types.ModuleType("run")
stand_in.run = lambda config: print(config) or 130
sys.argv[1:] = ["quickstart", "--device", "cpu", "--seed", "3", "--steps", "5", "--output", "here", "--resume"]
from rlcore.cli.main import main
main()
"""
    result = run_python(code)
    assert result.returncode == 130, result.stderr
    assert "device='cpu', executor='hf', launcher=None, seed=3, threads=None, steps=5, output=" in result.stdout
    assert "PosixPath('here'), resume=True" in result.stdout
