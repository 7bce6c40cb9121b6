"""Calls of workers in processes of their own: what goes there, what comes back, and how errors do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from rlcore.engines.launchers.failures import describe, raised
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import DeviceError, InvalidInputError, WorkerError
from tests.accuracy import assert_same_bits
from tests.engines.ask import ask_all
from tests.warm import LIMIT_S

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the child cannot import this file


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64]


@dataclass
class Point:
    x: int
    name: str
    values: tuple[float, ...]


class Inner:
    """Stands for the user's module: its methods' answers are not annotated."""

    def __init__(self) -> None:
        self.kept: Any = None

    def echo(self, value: Any) -> Any:
        return value

    def make(self, what: str) -> Any:
        made: dict[str, Any] = {
            "nothing": None,
            "nested": {"a": [1, (2, [3.5, ("x", b"y")])], "b": {1: True}, "empty": [(), [], {}]},
            "object": object(),
            "object in a list": [1, object()],
            "set": {1, 2},
            "dataclass": Point(1, "a", (1.0,)),
            "big integer": 2**80,
            "tuple keys": {(1, 2): 3},
            "sparse tensor": torch.eye(3).to_sparse(),
            "meta tensor": torch.empty(3, device="meta"),
            "cycle": (cycle := []),
        }
        cycle.append(cycle)
        return made[what]


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.module = Inner()

    def who(self) -> tuple[int, int, str]:
        return self.context.rank, os.getpid(), self.context.device_name

    def point(self) -> Point:
        return Point(3, "three", (1.5, 2.5))

    def points(self) -> list[Point]:
        return [self.point(), self.point()]

    def mislabelled(self) -> int:
        return "text"  # type: ignore[return-value]

    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return time.monotonic()

    def come(self, here: Path, other: Path) -> bool:
        """Come, and return True if another came within 10 seconds."""
        here.touch()
        deadline = time.monotonic() + 10
        while not other.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return other.exists()

    def meet(self, folder: Path) -> int:
        """Come back when all workers of the group are in this method."""
        (folder / str(self.context.rank)).touch()
        while (found := len(list(folder.iterdir()))) < self.context.world_size:
            time.sleep(0.01)
        return found

    def count(self, number: int) -> int:
        for index in range(number):
            self.context.emit(index)
        return number

    def add_up(self, value: float) -> float:
        group = self.context.process_group(60.0)
        total = torch.tensor(value)
        torch.distributed.all_reduce(total, group=group)
        return float(total)

    def listening(self) -> list[str]:
        """Addresses this process listens on while a group exists, as /proc/net/tcp and tcp6 write them."""
        group = self.context.process_group(60.0)
        torch.distributed.barrier(group=group)
        inodes = set()
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                inodes.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        found = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.append(fields[1].partition(":")[0])
        torch.distributed.barrier(group=group)
        return found

    def is_same_as(self, other: Any) -> bool:
        return other is self

    def value_of(self, other: Any) -> int:
        return int(other.module.kept)

    def keep(self, value: Any) -> None:
        self.module.kept = value

    def kept(self) -> Tensor:
        return self.module.kept  # type: ignore[no-any-return]

    def modify(self, tensor: Tensor) -> Tensor:
        return tensor.add_(1)

    def are_aliases(self, pair: list[Tensor]) -> bool:
        return pair[0].data_ptr() == pair[1].data_ptr()

    def threads(self) -> int:
        return torch.get_num_threads()

    def fail(self, how: str) -> None:
        if how == "exit":
            sys.exit(7)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "signal":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        if how == "recursion":
            self.fail(how)
        if how == "huge":
            raise ValueError("start" + "x" * 50_000_000 + "end")
        if how == "surrogate":
            raise ValueError("\ud800")
        if how == "ours":
            raise DeviceError("the device is on fire")
        if how == "unprintable":
            raise UnprintableError

    def close(self) -> None:
        pass


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


Start = Any


@pytest.fixture(scope="module")
def pair(join_group: Start) -> Iterator[WorkerGroup]:
    with join_group(Worker, 2) as group:
        yield group


def ask(group: WorkerGroup, method: str, *args: Any, **kwargs: Any) -> Any:
    """Of rank 0 alone."""
    return group.workers[0].call(method, *args, **kwargs).result(60)


# --------------------------------------------------------------------------------------------------- the group


def test_each_worker_has_a_process_and_a_device_of_its_own(pair: WorkerGroup) -> None:
    first, second = ask_all(pair, "who")
    assert (first[0], first[2], second[0], second[2]) == (0, "cpu:4", 1, "cpu:5")
    assert len({first[1], second[1], os.getpid()}) == 3
    assert [worker.process_id for worker in pair.workers] == [first[1], second[1]]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_reduce_over_a_group_without_a_port_open_to_the_network(join_group: Start, num_workers: int) -> None:
    with join_group(Worker, num_workers) as group:
        calls = [((float(rank + 1),), {}) for rank in range(num_workers)]
        for _ in range(3):
            assert group.call("add_up", calls) == [num_workers * (num_workers + 1) / 2] * num_workers
        addresses = ask_all(group, "listening")
        if num_workers > 1:
            assert all(addresses), "gloo listens somewhere"
        loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
        assert {address for found in addresses for address in found} <= loopback


def test_calls_of_many_workers_overlap(pair: WorkerGroup, tmp_path: Path) -> None:
    assert ask_all(pair, "meet", tmp_path) == [2, 2]


def test_calls_of_one_worker_run_in_their_order(pair: WorkerGroup) -> None:
    futures = [pair.workers[0].call("nap", seconds) for seconds in (0.1, 0.0, 0.05, 0.0)]
    ended = [future.result(60) for future in futures]
    assert ended == sorted(ended)


def test_progress_arrives_before_the_result(pair: WorkerGroup) -> None:
    events: list[Any] = []
    assert pair.call("count", [((50,), {}), ((0,), {})], events.append) == [50, 0]
    assert events == list(range(50))


def test_an_error_in_the_progress_callback_is_the_callers_and_the_worker_goes_on(pair: WorkerGroup) -> None:
    def refuse(event: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pair.call("count", [((50,), {}), ((0,), {})], refuse)
    assert ask(pair, "count", 2) == 2


def test_a_progress_callback_may_call_the_engine(pair: WorkerGroup) -> None:
    answers: list[Any] = []
    calls = [((2,), {}), ((0,), {})]
    assert pair.call("count", calls, lambda event: answers.append(ask_all(pair, "nap", 0)[0])) == [2, 0]
    assert len(answers) == 2


def test_a_handle_arrives_as_the_worker_itself(join_group: Start) -> None:
    with join_group(Worker, engine="engine A") as one, join_group(Worker, engine="engine B") as other:
        assert one.workers[0].process_id == other.workers[0].process_id, "one process a device"
        assert ask(one, "is_same_as", one.workers[0])
        assert not ask(one, "is_same_as", other.workers[0])
        ask(other, "keep", 17)
        assert ask(one, "value_of", other.workers[0]) == 17


def test_one_engine_leaves_a_shared_process_and_the_other_stays(join_group: Start) -> None:
    with join_group(Worker, 2, engine="engine A") as one:
        with join_group(Worker, 2, engine="engine B") as other:
            assert ask_all(other, "add_up", 1.0) == [2.0, 2.0]
            assert ask_all(one, "add_up", 2.0) == [4.0, 4.0]
        assert ask_all(one, "add_up", 3.0) == [6.0, 6.0]


def test_two_engines_called_at_once_from_two_threads_do_not_cross(join_group: Start) -> None:
    with (
        join_group(Worker, 2, engine="A") as one,
        join_group(Worker, 2, engine="B") as other,
        ThreadPoolExecutor(2) as pool,
    ):
        ours = pool.submit(lambda: [ask_all(one, "add_up", 1.0) for _ in range(15)])
        theirs = pool.submit(lambda: [ask_all(other, "add_up", 10.0) for _ in range(15)])
        assert ours.result(60) == [[2.0, 2.0]] * 15
        assert theirs.result(60) == [[20.0, 20.0]] * 15


def test_workers_share_the_processors(join_group: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcore.engines.launchers.process import worker_environment

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    processors = len(os.sched_getaffinity(0))
    half = str(max(1, processors // 2))
    assert worker_environment(["cpu:0", "cpu:1"], owns_process=True)["OMP_NUM_THREADS"] == half
    assert worker_environment(["cuda:0", "cuda:1"], owns_process=False)["OMP_NUM_THREADS"] == half
    assert "OMP_NUM_THREADS" not in worker_environment(["cuda:0"], owns_process=True), "vLLM decides"
    with join_group(Worker) as group:
        assert ask(group, "threads") == 1, "the user's own setting wins"


# ---------------------------------------------------------------------------------------------- what comes back


def test_plain_data_comes_back_as_it_was(pair: WorkerGroup) -> None:
    nested = ask(pair, "module.make", "nested")
    assert nested == {"a": [1, (2, [3.5, ("x", b"y")])], "b": {1: True}, "empty": [(), [], {}]}
    assert type(nested["a"][1]) is tuple
    assert ask(pair, "module.make", "nothing") is None


def test_annotated_dataclasses_come_back_as_such(pair: WorkerGroup) -> None:
    assert ask(pair, "point") == Point(3, "three", (1.5, 2.5))
    assert ask(pair, "points") == [Point(3, "three", (1.5, 2.5))] * 2


def test_an_override_without_an_annotation_keeps_its_bases(join_group: Start) -> None:
    class Override(Worker):
        def points(self):  # type: ignore[no-untyped-def]
            return super().points()[:1]

        def point(self) -> Any:
            return super().point()

    with join_group(Override, 1) as group:
        assert ask(group, "points") == [Point(3, "three", (1.5, 2.5))]
        assert ask(group, "point") == Point(3, "three", (1.5, 2.5))


def test_an_answer_unlike_its_annotation_is_an_error(pair: WorkerGroup) -> None:
    with pytest.raises(InvalidInputError, match=r"mislabelled\(\) is annotated to return .*int.*Expected `int`, got"):
        ask(pair, "mislabelled")


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("object", "object"),
        ("object in a list", "object"),
        ("set", "set"),
        ("dataclass", "Point"),
        ("big integer", "serialize ints"),
        ("tuple keys", "a dict whose keys are tuple"),
        ("sparse tensor", "Tensor of layout torch.sparse_coo"),
        ("meta tensor", "on meta"),
        ("cycle", "recursion"),
    ],
)
def test_what_cannot_come_back_is_named(pair: WorkerGroup, what: str, named: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"module.make\(\) returned an object .* \(.*{named}.*\); return numb"):
        ask(pair, "module.make", what)
    assert ask(pair, "module.make", "nothing") is None, "the worker goes on"


def test_an_argument_that_cannot_be_pickled_is_refused_before_anything_is_sent(pair: WorkerGroup) -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise ValueError("not me")

    with pytest.raises(InvalidInputError, match="an argument cannot be sent to a worker process: not me"):
        ask_all(pair, "keep", Stubborn())
    with pytest.raises(InvalidInputError, match=r"an argument cannot be sent to a worker process: .*generator"):
        ask_all(pair, "keep", (number for number in range(3)))
    assert len(ask_all(pair, "who")) == 2, "the workers go on"


# ----------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("size", [10, 100_000], ids=["in the message", "in shared memory"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_go_and_come_back(pair: WorkerGroup, dtype: torch.dtype, size: int) -> None:
    tensor = (torch.arange(size) % 5).to(dtype)
    back = ask(pair, "module.echo", tensor)
    assert back.dtype is dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_tensors_of_every_form_go_and_come_back(pair: WorkerGroup) -> None:
    big = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    forms = {
        "0-dim": torch.tensor(3.5),
        "0-dim of a large one": big[1, 2],
        "empty": torch.empty(0, 7),
        "empty of a large one": big[:0],
        "transposed": big.t(),
        "strided": big[::3, ::7],
        "expanded": torch.ones(1).expand(100_000),
        "conjugate": torch.randn(200, 300, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj(),
        "parameter": torch.nn.Parameter(big),
        "not contiguous nhwc": torch.randn(2, 30, 40, 50).to(memory_format=torch.channels_last),
    }
    back = ask(pair, "module.echo", forms)
    assert back.keys() == forms.keys()
    for name, tensor in forms.items():
        assert back[name].shape == tensor.shape, name
        assert_same_bits(back[name], tensor.detach().resolve_conj(), name)
        assert not back[name].requires_grad


def test_many_tensors_at_once(pair: WorkerGroup) -> None:
    tensors = [torch.full((index % 50, 700), index) for index in range(500)]
    back = ask(pair, "module.echo", tensors)
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))


def test_one_tensor_twice_in_an_argument_is_one_there(pair: WorkerGroup) -> None:
    for size in (10, 100_000):
        tensor = torch.zeros(size)
        assert ask(pair, "are_aliases", [tensor, tensor])
        assert not ask(pair, "are_aliases", [tensor, tensor.clone()])


def test_a_worker_changes_its_copy(pair: WorkerGroup) -> None:
    tensor = torch.zeros(100_000)
    assert ask(pair, "modify", tensor).sum() == 100_000
    assert tensor.sum() == 0


def test_a_small_view_does_not_take_its_large_storage_along() -> None:
    from rlcore.engines.launchers.pickled_calls import dump_pickled_call

    body, tensors = dump_pickled_call((torch.zeros(10_000_000)[5:8],))
    assert len(body) < 1000
    assert tensors == []


def test_a_tensor_that_was_sent_can_still_be_freed() -> None:
    from rlcore.engines.launchers.pickled_calls import dump_pickled_call

    for tensor in (torch.ones(3), torch.ones(1_000_000), torch.ones(0), torch.ones(2, dtype=torch.complex64).conj()):
        dump_pickled_call((tensor,))
        assert tensor.untyped_storage().resizable()


def test_small_results_that_the_user_keeps_hold_no_shared_memory(pair: WorkerGroup) -> None:
    before = mapped_segments()
    kept = [ask(pair, "module.echo", torch.tensor([float(value)])) for value in range(100)]
    assert mapped_segments() <= before + 4, "but for some to be used again"
    large = [ask(pair, "module.echo", torch.full((100_000,), float(value))) for value in range(20)]
    assert mapped_segments() >= len(large), "those hold some, and are seen here"
    assert torch.cat(kept).tolist() == list(range(100))


def mapped_segments() -> int:
    """How often this process has memory mapped that it shares with workers."""
    return Path("/proc/self/maps").read_text().count("/memfd:rlcore (deleted)")


def test_memory_that_a_worker_keeps_is_not_used_again(pair: WorkerGroup) -> None:
    ask(pair, "keep", torch.full((100_000,), 7.0))
    for value in range(5):
        ask(pair, "module.echo", torch.full((100_000,), float(value)))
    assert ask(pair, "kept").unique().tolist() == [7.0]


def test_memory_that_the_user_keeps_is_not_used_again(pair: WorkerGroup) -> None:
    kept = [ask(pair, "module.echo", torch.full((100_000,), float(value))) for value in range(6)]
    assert [tensor.unique().tolist() for tensor in kept] == [[float(value)] for value in range(6)]
    views = [tensor[10:20] for tensor in kept]
    del kept
    ask(pair, "module.echo", torch.full((100_000,), 99.0))
    assert [view.unique().tolist() for view in views] == [[float(value)] for value in range(6)]


def test_a_result_outlives_its_worker(join_group: Start) -> None:
    with join_group(Worker) as group:
        result = ask(group, "module.echo", torch.arange(100_000))
    assert torch.equal(result, torch.arange(100_000))


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "SystemExit: 7"),
        ("interrupt", "KeyboardInterrupt"),
        ("signal", "KeyboardInterrupt"),
        ("recursion", "RecursionError: maximum recursion depth exceeded"),
        ("surrogate", "ValueError: "),
        ("unprintable", "UnprintableError: <its text cannot be had: "),
    ],
)
def test_whatever_a_worker_raises_is_one_error_and_it_goes_on(pair: WorkerGroup, how: str, text: str) -> None:
    before = ask_all(pair, "who")
    with pytest.raises(WorkerError, match=rf"fail\(\) failed on rank 0 \(cpu:4\): .*{text}") as caught:
        ask(pair, "fail", how)
    assert "in fail" in caught.value.traceback
    assert (caught.value.rank, caught.value.device, caught.value.method) == (0, "cpu:4", "fail")
    assert ask_all(pair, "who") == before


def test_an_error_of_many_lines_is_told_by_its_type_and_how_it_begins() -> None:
    """The last line of what a compiler's error says is how to suppress it."""
    context = WorkerContext("the train engine", 0, 1, "cpu:0", 1)
    failure = describe(RuntimeError("the linker failed\n\nno -lc10\n\nYou can suppress this exception"))
    told = str(raised(failure, context, "train_batch"))
    assert told.startswith("train_batch() failed on rank 0 (cpu:0): RuntimeError: the linker failed no -lc10 You can")


def test_a_huge_error_is_cut_in_the_middle(pair: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        ask(pair, "fail", "huge")
    assert len(str(caught.value)) < 200_000
    assert "characters left out" in caught.value.traceback
    assert caught.value.traceback.rstrip().endswith("xend")


def test_our_own_errors_keep_their_class_and_say_where(pair: WorkerGroup) -> None:
    with pytest.raises(DeviceError, match=r"^the device is on fire\n") as caught:
        ask(pair, "fail", "ours")
    assert r"raised by fail() on rank 0 (cpu:4) of the test engine" in caught.value.__notes__[0]
    assert 'raise DeviceError("the device is on fire")' in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_class_that_cannot_start_is_an_error_and_leaves_nothing(
    join_group: Start, holdings: Any, wait_until: Any
) -> None:
    class Broken(Worker):
        def __init__(self, context: WorkerContext) -> None:
            super().__init__(context)
            if context.rank == 1:
                raise ValueError("no such thing")

    before = holdings()  # with the process of the first worker, which stays
    with (
        pytest.raises(WorkerError, match=r"start\(\) failed on rank 1 \(cpu:3\): ValueError: no such thing"),
        join_group(Broken, devices=["cpu:4", "cpu:3"]),
    ):
        pass
    wait_until(lambda: holdings() == before)


def test_a_failed_start_spares_the_other_engine_of_the_device(join_group: Start) -> None:
    class Broken(Worker):
        def __init__(self, context: WorkerContext) -> None:
            raise ValueError("no such thing")

    with join_group(Worker, engine="healthy") as healthy:
        process = healthy.workers[0].process_id
        with pytest.raises(WorkerError, match="no such thing"), join_group(Broken, engine="broken"):
            pass
        assert ask(healthy, "who")[1] == process


@pytest.mark.parametrize(
    ("how", "text"), [("exit", "SystemExit: 7"), ("recursion", "RecursionError"), ("ours", "the device is on fire")]
)
def test_inline_workers_fail_alike(start_group: Start, how: str, text: str) -> None:
    kind = DeviceError if how == "ours" else WorkerError
    with start_group(Worker, launcher="inline") as group, pytest.raises(kind, match=text):
        ask(group, "fail", how)


def test_a_call_in_this_process_may_wait_for_workers_of_others(start_group: Start, tmp_path: Path) -> None:
    """As a sender of weights in the user's process waits for its receivers, which another thread calls."""
    here, there = tmp_path / "here", tmp_path / "there"
    with (
        start_group(Worker) as apart,
        start_group(Worker, launcher="inline") as inline,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(ask_all, inline, "come", here, there)
        while not here.exists() and not call.done():
            time.sleep(0.01)
        assert ask_all(apart, "come", there, here) == call.result() == [True]


# ------------------------------------------------------------------------------------- programs that start workers

_WORKER = '''
class Worker:
    """Defined in {place}."""
    def __init__(self, context):
        self.rank = context.rank
    def double(self, value):
        return helper(value)
    def close(self):
        pass

def helper(value):
    return value * FACTOR

FACTOR = 2
'''
_USE = """
from rlcore.engines.launchers.launch import start_workers
group = start_workers(Worker, "the engine", ["cpu:0"], launcher="process", timeout_s=100)
print(group.call("double", [(("ab",), {})]))
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_starts_workers_of_its_own_class(tmp_path: Path) -> None:
    script = tmp_path / "algorithm.py"
    script.write_text(_WORKER.format(place="a script") + _USE + "group.stop()\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.stdout, done.stderr) == ("['abab']\n", "")


def test_a_class_made_by_exec_as_in_a_notebook_works(join_group: Start) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(_WORKER.format(place="a cell"), space)
    with join_group(space["Worker"]) as group:
        assert ask(group, "double", 21) == 42


@pytest.mark.slow
def test_workers_that_nobody_closed_end_with_the_program(
    run_python: Any, tmp_path: Path, living: Any, wait_until: Any
) -> None:
    done = run_python(_WORKER.format(place="a script") + _USE, env={"RLCORE_RUNTIME": str(tmp_path)})
    assert (done.stdout, done.stderr, done.returncode) == ("['abab']\n", "", 0)
    wait_until(lambda: living(str(tmp_path)) == [])  # their guards are the last
    assert list(tmp_path.iterdir()) == []
