"""The page says what the records say, needs nothing from elsewhere, and holds its labels on every screen."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from records import STEP, a_record, result
from typer.testing import CliRunner

from rlcore.bench.record import CaseResult, Record, Telemetry, write
from rlcore.bench.reports import charts
from rlcore.bench.reports.answers import ReportRun
from rlcore.bench.reports.page import peer_groups, render, shares
from rlcore.cli.bench import bench
from rlcore.cli.bench_output import print_results

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
OKABE_ITO = {"#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7"}


@pytest.fixture(scope="module")
def page() -> str:
    gpu = a_record(20.0, accelerator_model_name="NVIDIA H200", accelerators_per_node=4)
    return render([ReportRun("host", a_record()), ReportRun("gpu", gpu, usd_per_hour=3.0)])


def text_of(page: str) -> str:
    plain = re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(plain))


def test_what_whoever_ran_it_noted_is_shown_beside_the_machine() -> None:
    page = text_of(render([ReportRun("host", a_record(hw_notes="three other jobs")), ReportRun("other", a_record())]))
    assert "hw notes three other jobs measured" in page and page.count("hw notes") == 1
    assert "host / other differ in: hw_notes three other jobs / absent" in page


@pytest.mark.parametrize(
    "sentence",
    [
        "host: AMD EPYC, 2 cores gpu: NVIDIA H200 one step of RL 6.5 s 325 ms (0.05 times host)",
        "tokens trained a second, whole step 1,000 20,000 (20 times host)",
        "steps of RL for a dollar not measured 3,692",
        "bubble: neither sampling, scoring nor training 15% 15%",
        "USD for a million tokens trained not measured 0.0417 at 3 an hour and device",
        "what limits it generate: 46% of a step generate: 46% of a step",
        "matrix products, bfloat16 100 GFLOP/s 100 GFLOP/s (1 times host)",
        "fastest peer's time over ours 1.20 (1 case) 1.20 (1 case)",
        "disturbed by shared: 1 of 21 results shared: 1 of 21 results",
        "standard run, 21 results, 1 fail, 1 blocked",
        "memory/bandwidth copy, of memory",
        "chunked 50 ms against a peer 1.0 with a long name, without entropy 60 ms: 1.20x",
        "The runs are of different devices: a ratio compares whole stacks",
        "memory 10 GB/s; datasheet n/a 10 GB/s; datasheet 4.8 TB/s (0%)",
        "blocked it is the host copies/to_device",
        "host: 1 results shared (others used the host)",
        "a step (qwen2-tiny, 4 prompts, 4 samples)",
    ],
)
def test_page_says_what_the_records_say(page: str, sentence: str) -> None:
    assert sentence in text_of(page)


def test_page_of_a_quick_run_has_the_tokens_sampled_from_the_step() -> None:
    quick = msgspec.structs.replace(
        a_record(), cases=[result("rl/step", "x", 6.5, **STEP, bubble=0.1, new_tokens=800.0)]
    )
    assert "tokens sampled a second 800 " in text_of(render([ReportRun("quick", quick)]))


def test_two_machines_are_compared_per_step_and_dollar_and_only_where_they_did_the_same() -> None:
    other = a_record(20.0)
    cases = [msgspec.structs.replace(case, params=case.params | {"devices": 4}) for case in other.cases]
    shown = text_of(
        render(
            [
                ReportRun("a", a_record(), 2.0),
                ReportRun("b", msgspec.structs.replace(other, cases=cases), usd_per_hour=3.0),
            ]
        )
    )
    assert "steps of RL for a dollar 277 923 (3.33 times a)" in shown  # 20 times as fast, 6 times as expensive
    assert "USD for a million tokens trained 0.556 at 2 an hour and device 0.167 at 3 an hour and device (0.3" in shown
    cases = [msgspec.structs.replace(case, params=case.params | {"model": "qwen2-7b"}) for case in other.cases]
    shown = text_of(render([ReportRun("a", a_record()), ReportRun("b", msgspec.structs.replace(other, cases=cases))]))
    assert "one step of RL 6.5 s (qwen2-tiny) 325 ms (qwen2-7b, other model: not comparable)" in shown
    assert "times a" not in shown[: shown.index("matrix products")]
    cases = [msgspec.structs.replace(case, params=case.params | {"prompts": 8}) for case in other.cases]
    shown = text_of(render([ReportRun("a", a_record()), ReportRun("b", msgspec.structs.replace(other, cases=cases))]))
    assert "one step of RL 6.5 s 325 ms (other sizes: not comparable)" in shown


def scattered(record: Record, factors: tuple[float, ...]) -> Record:
    """With such samples of everything."""
    return msgspec.structs.replace(
        record,
        cases=[
            msgspec.structs.replace(
                case,
                metrics=[
                    msgspec.structs.replace(metric, samples=[metric.samples[1] * factor for factor in factors])
                    for metric in case.metrics
                ],
            )
            for case in record.cases
        ],
    )


def test_of_equal_runs_the_first_screen_says_no_ratio() -> None:
    wide, narrow = (0.7, 1.0, 1.6), (0.99, 1.0, 1.01)
    for factors, told in {wide: "cannot be told from a", narrow: "about equal to a"}.items():
        a, b = (scattered(a_record(speed), factors) for speed in (1.0, 1.54 if factors is wide else 1.02))
        calibration = msgspec.structs.replace(b.calibration, limits={"product/bfloat16": 1.54e11})
        b = msgspec.structs.replace(b, calibration=calibration)
        shown = text_of(render([ReportRun("a", a), ReportRun("b", b)]))
        shown = shown[: shown.index("disturbed by")]
        assert f"one step of RL 6.5 s {'4.22' if factors is wide else '6.37'} s ({told})" in shown
        assert "matrix products, bfloat16 100 GFLOP/s 154 GFLOP/s memory" in shown, "measured once: no word on chance"
        assert "times a" not in shown


def test_first_screen_says_no_ratio_that_others_on_the_host_may_have_made() -> None:
    runs = []
    for name, speed, share in (("a", 1.54, 0.1), ("b", 1.0, 0.6)):
        found = a_record(speed)
        cases = [msgspec.structs.replace(case, telemetry=Telemetry(host_share_of_others=share)) for case in found.cases]
        runs.append(ReportRun(name, msgspec.structs.replace(found, cases=cases)))
    shown = text_of(render(runs))
    shown = shown[: shown.index("matrix products")]
    told = "cannot be told from a: others used 10% of the host's processors, and then 60%"
    assert f"one step of RL 4.22 s 6.5 s ({told})" in shown and "times a" not in shown


def test_of_three_runs_those_of_one_model_are_set_against_each_other() -> None:
    large = a_record(20.0)
    cases = [msgspec.structs.replace(case, params=case.params | {"model": "qwen2-7b"}) for case in large.cases]
    runs = [
        ReportRun("a", a_record()),
        ReportRun("b", msgspec.structs.replace(large, cases=cases)),
        ReportRun("c", a_record(4.0)),
    ]
    shown = text_of(render(runs))
    told = "325 ms (qwen2-7b, other model: not comparable) 1.62 s (qwen2-tiny, 0.25 times a)"
    assert f"one step of RL 6.5 s (qwen2-tiny) {told}" in shown


def test_trainer_alone_is_ours_and_disturbances_are_counted() -> None:
    marks = ["shared: a", "throttled: b"]
    cases = [
        result("train/dense_1.5b", name, 1.0, {"model": "1.5b"}, tokens_a_device=rate, marks=marks)
        for name, rate in (("torch FSDP2", 38e3), ("engine", 47e3), ("engine", 43e3))
    ]
    shown = text_of(render([ReportRun("a", of_cases(*cases))]))
    assert "tokens trained a second, trainer alone 47,000 " in shown
    assert "disturbed by shared: 3, throttled: 3 of 3 results" in shown


def test_page_without_a_step_says_what_to_run() -> None:
    shown = text_of(render([ReportRun("a", msgspec.structs.replace(a_record(), cases=a_record().cases[3:]))]))
    assert "No step of RL was measured" in shown and "rlcore bench run rl/step" in shown


def of_cases(*cases: CaseResult) -> Record:
    return msgspec.structs.replace(a_record(), cases=list(cases))


def test_share_is_of_ours_and_never_of_what_computes_nothing() -> None:
    needs = {"memory": 10**8}
    record = of_cases(
        result("kernels/gae", "scan", 0.05, limits=needs),
        result("kernels/gae", "a peer", 0.04, limits=needs),
        result("kernels/gae", "copy", 0.01, limits=needs),
        result("host_memory/batch_to_host", "foreach", 0.02, limits=needs),
        result("host_memory/batch_to_host", "one_copy", 0.01, limits=needs),
        result("memory/bandwidth", "copy", 0.02, limits=needs),
    )
    group = shares(ReportRun("a", record))
    found = [(bar.label, bar.detail, bar.value) for bar in group.bars]
    assert found == [
        ("host_memory/batch_to_host", "foreach, of memory", "50%"),
        ("kernels/gae", "scan, of memory", "20%"),
        ("memory/bandwidth", "copy, of memory", "50%"),
    ]


def test_races_have_ours_and_somebody_or_something_to_be_set_against() -> None:
    record = of_cases(
        result("host_memory/batch_to_host", "copy_batch", 0.3),
        result("host_memory/batch_to_host", "foreach", 0.2),
        result("host_memory/batch_to_host", "one_copy", 0.1),
        result("kernels/linear_loss/8b", "chunked", 0.5),
        result("kernels/linear_loss/8b", "bare products", 0.4),
        result("dispatch/device", "registry", 1e-6),
        result("dispatch/device", "registry, default", 2e-6),
        result("memory/bandwidth", "copy", 0.02),
        result("memory/bandwidth", "fill", 0.02),
        result("train/dense", "engine", 0.1, {"T": 8, "lengths": "equal"}),
        result("train/dense", "torch FSDP2", 0.2, {"T": 8, "lengths": "equal"}),
        result("train/dense", "engine", 0.1, {"T": 8, "lengths": "uneven"}),
        result("train/dense", "torch FSDP2", 0.1, {"T": 8, "lengths": "uneven"}),
    )
    shown = [(group.title, group.summary) for group in peer_groups(ReportRun("a", record), is_alone=True)]
    assert shown == [
        ("host_memory/batch_to_host", "copy_batch 300 ms against foreach 200 ms: 0.67x (floor: one_copy 100 ms)"),
        ("kernels/linear_loss/8b", "chunked 500 ms (floor: bare products 400 ms)"),
        ("train/dense (lengths equal)", "engine 100 ms against torch FSDP2 200 ms: 2.00x"),
        ("train/dense (lengths uneven)", "engine 100 ms against torch FSDP2 100 ms: 1.00x"),
    ]
    assert "fastest peer's time over ours 1.10 (3 cases: 0.67 to 2.00)" in text_of(render([ReportRun("a", record)]))


def test_cases_of_others_in_our_folders_and_half_a_step_do_not_break_the_page() -> None:
    sizes = {"bytes": 8, "K": "big", "L": 0}
    shown = text_of(
        render(
            [
                ReportRun(
                    "a",
                    of_cases(
                        result("rl/step", "theirs", 6.5, {"devices": "two"}, generate=1.0),
                        result("product/sweep", "theirs", 1.0, sizes),
                        result("attention/mine", "theirs", 1.0, {"L": 256}),
                        result("collectives/mine", "theirs", 1.0, sizes),
                        result("collectives/mine", "theirs", 1.0, sizes | {"bytes": 16}),
                    ),
                    usd_per_hour=2.0,
                )
            ]
        )
    )
    assert "one step of RL 6.5 s" in shown and "for a dollar" not in shown
    odd = result("rl/step", "theirs", 6.5, {"devices": "two"}, **STEP, trained_tokens=10.0)
    told = text_of(render([ReportRun("a", of_cases(odd), usd_per_hour=2.0)]))
    assert "for a dollar" not in told
    assert "a: its price is not used, as no whole rl/step was measured" in told
    assert "Collectives, latency" in shown and "bus bandwidth" not in shown


def test_what_was_not_measured_is_not_set_as_an_answer() -> None:
    bare = msgspec.structs.replace(a_record(), calibration=None, cases=a_record().cases[-1:])
    page = render([ReportRun("a", a_record()), ReportRun("b", bare)])
    answers = page[: page.index("</table>")]
    cells = re.findall(r'<td( class="absent")? data-label="\w">([^<]*)</td>', answers)
    assert {text for absent, text in cells if absent} == {"not measured"}
    assert all(absent for absent, text in cells if text == "not measured")
    assert not all(absent for absent, _ in cells)


def test_targets_of_the_device_are_counted() -> None:
    gpu = msgspec.structs.replace(
        a_record(accelerator_model_name="NVIDIA H200"),
        cases=[result("kernels/token_logprob", "triton", 1e-3), result("kernels/linear_loss/8b", "tiled", 1.0)],
    )
    shown = text_of(render([ReportRun("host", a_record()), ReportRun("gpu", gpu)]))
    assert re.search(r"targets met none set for it 1 of 2, \d not measured ", shown)
    assert "targets met" not in text_of(render([ReportRun("host", a_record())]))


def test_page_needs_nothing_from_elsewhere_and_escapes_what_it_is_given(page: str) -> None:
    assert re.findall(r"(?:src|href|url|@import)\s*[=(:]", page) == []
    assert "<script" not in page and "http" not in page
    assert "<b>wrong</b>" not in page and "&lt;b&gt;wrong" in page


def test_page_of_a_record_without_limits_or_steps_says_so() -> None:
    record = msgspec.structs.replace(a_record(), calibration=None, cases=a_record().cases[-2:])
    shown = text_of(render([ReportRun("old", record)]))
    assert "limits were not measured" in shown
    for absent in ("by phase", "Ours against peers", "By size", "Share of what"):
        assert absent not in shown


def test_limits_that_may_be_too_low_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    record = a_record()
    assert record.calibration is not None
    doubtful = msgspec.structs.replace(record.calibration, marks=["shared: others used the host's processors"])
    record = msgspec.structs.replace(record, calibration=doubtful)
    print_results(record)
    told = "limits may be too low: shared: others used the host's processors"
    assert told in capsys.readouterr().out and f"mine: {told}" in text_of(render([ReportRun("mine", record)]))


def test_colours_are_those_of_okabe_and_ito(page: str) -> None:
    light = page[page.index(":root") : page.index("@media")]
    assert set(re.findall(r"--c[0-5]:(#\w+)", light)) == OKABE_ITO


def test_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(a_record(), tmp_path / "a.json")
    found = CliRunner().invoke(bench, ["report", "a.json", "-o", "a.html", "--price", "a=2"])
    assert (found.exit_code, found.stderr) == (0, "a.html\n")
    assert "0.556 at 2 an hour" in (tmp_path / "a.html").read_text()
    found = CliRunner().invoke(bench, ["report", "a.json", "-o", "nowhere/a.html"])
    assert str(found.exception) == "cannot write the report nowhere/a.html: No such file or directory"


# --------------------------------------------------------------------------------------------------- charts


def widths(svg: str) -> list[float]:
    return [float(width) for width in re.findall(r'class="s\d" x="[\d.]+" width="([\d.]+)" height="10"', svg)]


def test_bars_are_as_long_as_their_numbers_and_end_at_full() -> None:
    needs = [result("mine/a", "x", 1.0, limits={"memory": round(share * 1e10)}) for share in (0.25, 1.2)]
    shown = render([ReportRun("a", of_cases(*needs[:1], *needs[1:]))])
    assert widths(shown) == [100.0], "the best of a case"
    shown = render([ReportRun("a", of_cases(needs[0]))])
    assert widths(shown) == [25.0]
    parts = dict.fromkeys(STEP, 1.0)
    step = result("rl/step", "x", 8.0, {"model": "m"}, **parts, trained_tokens=1.0)
    shown = render([ReportRun("a", of_cases(step))])
    assert widths(shown) == [*[12.5] * 6, 25.0]
    assert re.findall(r' x="([\d.]+)" width="12.50"', shown)[-1] == "62.50"


def test_curves_have_every_point_inside_and_higher_values_higher() -> None:
    found = charts.curves([charts.Line("a", [(8, 1.0), (1024, 300.0)])])
    ((_, ((x1, y1), (x2, y2))),) = found.lines
    assert 0 < x1 < x2 < charts.WIDTH and 0 < y2 < y1 < charts.HEIGHT
    assert [text for _, text in found.levels] == ["1", "10", "100", "1000"]
    assert [text for _, text in found.ticks] == ["8", "1024"]
    lines = [result(f"collectives/a & {n}", "x", 1.0, {"bytes": nbytes}) for n in range(3) for nbytes in (8, 16)]
    shown = render([ReportRun("a", of_cases(*lines))])
    assert 's over bytes: a &amp; 0, a &amp; 1, a &amp; 2"' in shown
    assert [shown.count(f'<{kind} class="s{n}"') for n, kind in enumerate(("circle", "rect", "path"))] == [3, 3, 3]


# -------------------------------------------------------------------------------------------------- browser

FAULTS = """
<script>
document.querySelectorAll("details").forEach(one => one.open = true);
const faults = [], root = document.documentElement, close = 0.5;
if (root.scrollWidth > innerWidth) faults.push(`the page is ${root.scrollWidth} wide on a screen of ${innerWidth}`);
const overlap = (a, b) => a.left < b.right - close && b.left < a.right - close
  && a.top < b.bottom - close && b.top < a.bottom - close;
for (const svg of document.querySelectorAll("svg.curves")) {
  const frame = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")];
  texts.forEach((text, i) => {
    const box = text.getBoundingClientRect();
    if (box.left < frame.left - close || box.right > frame.right + close || box.bottom > frame.bottom + close)
      faults.push(`cut: ${text.textContent}`);
    texts.slice(i + 1).forEach(other => { if (overlap(box, other.getBoundingClientRect()))
      faults.push(`overlap: ${text.textContent} and ${other.textContent}`); });
  });
}
for (const row of document.querySelectorAll(".row, tr, dl, .legend")) {
  const parts = [...row.children].filter(part => part.getBoundingClientRect().width);
  parts.forEach((part, i) => {
    if (part.scrollWidth > part.clientWidth + 1 && part.clientWidth) faults.push(`cut: ${part.textContent.trim()}`);
    parts.slice(i + 1).forEach(other => { if (overlap(part.getBoundingClientRect(), other.getBoundingClientRect()))
      faults.push(`overlap: ${part.textContent.trim()} and ${other.textContent.trim()}`); });
  });
}
root.dataset.answered = Math.round(document.querySelector(".big").getBoundingClientRect().bottom);
root.dataset.faults = JSON.stringify(faults);
root.dataset.page = getComputedStyle(document.body).backgroundColor;
</script>
"""

Look = Callable[..., tuple[str, str, int]]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """(faults, colour of the page, where the answer ends) of a page in a real browser."""
    if BROWSER is None:
        pytest.skip("needs a browser: no chromium or chrome on the path (Debian: apt install chromium)")

    def run(page: str, width: int, is_dark: bool) -> tuple[str, str, int]:
        file = tmp_path / "page.html"
        file.write_text(page.replace("</body>", FAULTS + "</body>"))
        command = [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=2000",
            f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        ]  # fmt: skip
        seen = subprocess.run(
            [*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        root = re.search(r'data-answered="(\d+)" data-faults="([^"]*)" data-page="([^"]*)"', seen.stdout)
        assert root is not None, seen.stderr
        shot = tmp_path / "shot.png"
        subprocess.run([*command, f"--screenshot={shot}", file.as_uri()], capture_output=True, timeout=120, check=True)
        assert shot.stat().st_size > 20_000  # an empty page has 3,000 bytes
        return html.unescape(root[2]), root[3], int(root[1])

    return run


@pytest.mark.parametrize(
    ("width", "is_dark"),
    [
        (390, True),
        (1280, False),
        pytest.param(390, False, marks=pytest.mark.slow),
        pytest.param(1280, True, marks=pytest.mark.slow),
        pytest.param(720, False, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_cut_or_overlaps_on_phone_and_desktop_in_light_and_dark(
    look: Look, page: str, width: int, is_dark: bool
) -> None:
    faults, colour, answered = look(page, width, is_dark)
    assert faults == "[]"
    assert answered <= (800 if width > 500 else 844)  # the heights of small screens
    assert colour == ("rgb(13, 17, 23)" if is_dark else "rgb(255, 255, 255)")


def test_a_label_that_is_cut_would_be_seen(look: Look, page: str) -> None:
    broken = page.replace(
        "<h2>", '<div class="row"><span style="white-space:nowrap">' + "long " * 60 + "</span></div><h2>", 1
    )
    assert "cut: long" in look(broken, 390, False)[0]
