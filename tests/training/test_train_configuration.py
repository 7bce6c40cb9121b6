"""The configuration of ``rlcore train``: each mistake in it is one line that names the field and what is accepted."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rlcore import ops
from rlcore.cli import main as cli
from rlcore.configuration_file import read_configuration
from rlcore.errors import CheckpointError, RlcoreError
from rlcore.rollout.item_source import ItemSource
from rlcore.training.config import LOSSES, TrainConfig
from rlcore.training.items import ShuffledItems, function_of, items_of
from rlcore.training.run_folder import TrainFolder

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
model: {model}
output: {output}
data: {{train: items.jsonl, reward: "judge:reward"}}
"""
JUDGE = """
def reward(item, text):
    return 0.0

def nothing():
    return []

def objects():
    return [print]

def not_a_number():
    return [{"prompt": "1", "x": float("nan")}]

def pair():
    return [{"prompt": "1", "x": (1, 2)}]

def fails():
    raise KeyError("the data base")

def leaves():
    raise SystemExit("usage")

def no_workflow(config):
    return None

number = 3
"""


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "items.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1"}\n{"question": "1"}\n')
    (tmp_path / "null.jsonl").write_text('{"prompt": [1, 2]}\n{"prompt": null}\n')
    (tmp_path / "number.jsonl").write_text('{"prompt": 3}\n')
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "1"}]}\n')
    (tmp_path / "flag.jsonl").write_text('{"prompt": [true]}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1"}\nprompt\n')
    path = tmp_path / "config.yaml"
    path.write_text(GOOD.format(model=model, output=tmp_path / "run"))
    return path


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rollout.max_stalenes=2", "rollout.max_stalenes is no field here; did you mean 'max_staleness'? accepted: "),
        ("rollout.max_staleness=-1", "rollout.max_staleness must be a whole number of at least 0, got -1"),
        ("rollout.batch_size=2.5", "rollout.batch_size must be a whole number of at least 1, got 2.5"),
        ("rollout.temperature=0", "rollout.temperature must be a number of at least 0.01, got 0.0"),
        ("rollout.drop_equal_groups=1", "rollout.drop_equal_groups must be True or False, got 1"),
        ("rollout.workflow=mine", "rollout.workflow must be a function as \"module:name\", or None, got 'mine'"),
        ("algorithm.learning_rate=fast", "algorithm.learning_rate must be a number above 0, got 'fast'"),
        ("algorithm.loss=ppo", "algorithm.loss must be one of cispo, cpgd, decoupled_ppo"),
        ("algorithm.loss_options={clip: 1}", "algorithm.loss_options are not those of decoupled_ppo: "),
        ("algorithm.loss_options.clip_low=-1", "algorithm.loss_options are not those of decoupled_ppo: "),
        ("steps=many", "steps must be a whole number of at least 1, got 'many'"),
        ("seed=-1", "seed must be a whole number in [0, 2**63), got -1"),
        ("steps", "an override must be key=value, got 'steps'"),
        ("steps={", "the value of the override 'steps={' is no YAML; quote it"),
        ("steps.many=1", "steps must be a whole number of at least 1, got {'many': 1}"),
        ("model.path=x", "the override 'model.path=x' goes into 'model', which is "),
        ("data=3", "data must be a mapping, got 3"),
        ("data={}", "data.train is missing; it must be a file \"NAME.jsonl\", or a function as \"module:name\""),
        ("data.reward=null", "data.reward is missing; give it, or rollout.workflow"),
        ("data.reward=judge:nobody", "cannot import judge:nobody: AttributeError: module 'judge' has no attribute"),
        ("data.reward=judges:reward", "cannot import judges:reward: ModuleNotFoundError: No module named 'judges'"),
        ("data.reward=judge:number", "judge:number must be a function, got 3"),
        ("data.train=none.jsonl", "cannot read none.jsonl: No such file or directory"),
        ("data.train=bad.jsonl", "line 2 of bad.jsonl is no JSON: "),
        ("data.train=bare.jsonl", 'item 2 of bare.jsonl must have a "prompt", or give rollout.workflow; got {'),
        ("data.train=null.jsonl", 'the "prompt" of item 2 of null.jsonl must be a text or a list of token ids, or'),
        ("data.train=number.jsonl", 'the "prompt" of item 1 of number.jsonl must be a text or a list of token ids, or'),
        ("data.train=chat.jsonl", 'the "prompt" of item 1 of chat.jsonl must be a text or a list of token ids, or'),
        ("data.train=flag.jsonl", 'the "prompt" of item 1 of flag.jsonl must be a text or a list of token ids, or'),
        ("data.held_out=bare.jsonl", 'item 2 of bare.jsonl must have a "prompt", or give rollout.workflow; got {'),
        ("data.train=judge:nothing", "judge:nothing must give a list of at least one item, got []"),
        ("data.train=judge:objects", "the items of judge:objects must be plain data, for the checkpoint and "),
        ("data.train=judge:not_a_number", "the items of judge:not_a_number must be plain data, for the "),
        ("data.train=judge:pair", "items[0]['x'] = (1, 2), which would not come back equal."),
        ("data.train=judge:fails", "judge:fails failed: KeyError: 'the data base'; call it in Python to see where"),
        ("data.train=judge:leaves", "judge:leaves failed: SystemExit: usage; call it in Python to see where"),
        ("data.train=judge:reward", "judge:reward failed: TypeError: reward() missing 2 required positional"),
        ("data.held_out=judge:fails", "judge:fails failed: KeyError: 'the data base'; call it in Python to see where"),
        ("rollout.workflow=judge:fails", "judge:fails failed: TypeError: fails() takes 0 positional arguments but 1"),
        ("rollout.workflow=judge:no_workflow", "judge:no_workflow must return a Workflow, with `async def run"),
        ("algorithm.minibatches=257", "algorithm.minibatches must be at most the 256 answers of a batch (rollout."),
        ("rollout={samples: 1, drop_equal_groups: true}", "rollout.samples must be at least 2 with drop_"),
        ("algorithm.loss_options=null", "algorithm.loss_options must be a mapping of names to values, got None"),
        ("evaluation.temperature=0.001", "evaluation.temperature must be 0 or a number of at least 0.01, got 0.001"),
        ("trainer.options.devices=cpu", "trainer.options.devices is no option: devices is a field beside options"),
        ("sampler.options={launcher: x}", "sampler.options.launcher is no option: launcher is a field beside options"),
        ("sampler.options={1: 2}", "sampler.options must be a mapping of names to values, got {1: 2}"),
        (".steps=1", "an override must be key=value, got '.steps=1'"),
        ("rollout..samples=1", "an override must be key=value, got 'rollout..samples=1'"),
        ("steps=2026-13-45", "the value of the override 'steps=2026-13-45' is no YAML; quote it: month must be"),
        ("data={train: a, train: b}", "is no YAML; quote it: 'train' is given twice in line 1, column 1: {train"),
        ("placement=shared", 'rollout.max_staleness must be 0 with placement "shared", where samplers stand still'),
        ("sampler.replicas=2", "sampler.devices must be a list of as many for each of 2 replicas, got None"),
        ("sampler.devices=[]", 'sampler.devices must be the name of a device such as "cuda:1", or a list of them'),
        ("model=nowhere", "model path 'nowhere' is not a folder"),
        ("trainer.executor=fsdp3", "fsdp3"),
        ("output=items.jsonl", "items.jsonl exists and holds no run of rlcore train; give another output="),
    ],
)  # fmt: skip
def test_a_wrong_field_is_one_line(config: Path, override: str, told: str) -> None:
    found = CliRunner().invoke(cli.app, ["train", str(config), override])
    assert isinstance(found.exception, RlcoreError), found.exception
    assert told in str(found.exception) and "\n" not in str(found.exception)


def test_a_refused_run_leaves_no_folder(config: Path) -> None:
    found = CliRunner().invoke(cli.app, ["train", str(config), "model=nowhere", f"output={config.parent / 'a' / 'b'}"])
    assert isinstance(found.exception, RlcoreError)
    assert not (config.parent / "a").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            '{"model_type": "qwen2", "vocab_size": 21}',
            "is not the configuration of a run of rlcore train; give another",
        ),
        ("[1]", "is not the configuration of a run of rlcore train; give another output="),
        ('{"model": ', "cannot be read: Input data was truncated; give another output="),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_another_config_is_not_taken_for_a_run(
    config: Path, content: str, told: str, resume: bool
) -> None:
    """Every Hugging Face model folder has a config.json; ``output=`` of one must not replace it."""
    theirs = config.parent / "model"
    theirs.mkdir()
    (theirs / "config.json").write_text(content)
    with pytest.raises(RlcoreError) as caught:
        TrainFolder(read_configuration(config, [f"output={theirs}"], TrainConfig), resume=resume)
    assert str(caught.value).startswith(f"{theirs / 'config.json'} {told}")
    assert {path.name: path.read_text() for path in theirs.iterdir()} == {"config.json": content}


def test_a_resume_that_fails_changes_nothing(config: Path) -> None:
    with TrainFolder(read_configuration(config, [], TrainConfig), resume=False) as run:
        run.begin()
        run.append("metrics", [{"step": 0}, {"step": 1}])
        before = {path: path.read_bytes() for path in run.path.iterdir()}
    with TrainFolder(read_configuration(config, ["steps=7"], TrainConfig), resume=True) as run:
        assert {path: path.read_bytes() for path in run.path.iterdir()} == before
        run.go_on(0)
        assert json.loads((run.path / "config.json").read_bytes())["steps"] == 7


def test_a_run_that_is_older_than_pacing_goes_on_without(config: Path) -> None:
    with TrainFolder(read_configuration(config, [], TrainConfig), resume=False) as run:
        run.begin()
        run.checkpoint.mkdir()
        (run.checkpoint / "manifest.json").touch()
    record = run.path / "config.json"
    older = json.loads(record.read_bytes())
    del older["rollout"]["pacing"]
    record.write_text(json.dumps(older))
    with pytest.raises(RlcoreError, match=r"a run with another rollout\.pacing \(False, now True\); give the same"):
        TrainFolder(read_configuration(config, [], TrainConfig), resume=True)
    with TrainFolder(read_configuration(config, ["rollout.pacing=false"], TrainConfig), resume=True) as run:
        assert run.has_checkpoint


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot read the configuration config.yaml: No such file or directory"),
        ("- a\n", "config.yaml must hold fields and their values, got ['a']"),
        ("a: [\n", "config.yaml is no YAML: "),
        ("steps: 1\nsteps: 2\n", "config.yaml is no YAML: 'steps' is given twice in line 1, column 1"),
        ("steps: 2026-13-45\n", "config.yaml is no YAML: month must be in 1..12"),
        ("", "model is missing; it must be a text that is not empty"),
        ("model: m\n", "data is missing; it must be "),
    ],
)
def test_a_wrong_file_is_one_line(config: Path, text: str | None, told: str) -> None:
    config.unlink() if text is None else config.write_text(text)
    found = CliRunner().invoke(cli.app, ["train", "config.yaml"])
    assert isinstance(found.exception, RlcoreError), found.exception
    assert told in str(found.exception) and "\n" not in str(found.exception)


@pytest.mark.parametrize("tracker", ["tensorboard=true", "wandb=project"])
def test_a_tracker_that_is_absent_is_named_before_a_model_is_loaded(
    config: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    found = CliRunner().invoke(cli.app, ["train", str(config), f"metrics.{tracker}"])
    package = tracker.partition("=")[0]
    assert str(found.exception) == (
        f"metrics.{package} needs the package {package!r}; run: pip install 'rlcore[{package}]'"
    )


def test_the_example_is_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = read_configuration(ROOT / "examples" / "addition.yaml", ["steps=7"], TrainConfig)
    assert (found.steps, found.algorithm.learning_rate, found.rollout.max_staleness) == (7, 3e-4, 1)
    train, held_out = (
        items_of(found.data.train, ROOT / "examples", need_prompt=True),
        items_of(str(found.data.held_out), ROOT / "examples", need_prompt=True),
    )
    assert len(held_out) == 512 and not {one["prompt"] for one in train} & {one["prompt"] for one in held_out}
    verify = function_of(str(found.data.reward), ROOT / "examples")
    assert (verify({"a": 47, "b": 85}, "231"), verify({"a": 47, "b": 85}, "132")) == (1.0, 0.0)


def test_items_of_a_function_are_plain_whatever_scalars_it_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "scalars.py").write_text(
        "import numpy as np\ndef items(): return [{'prompt': np.str_('2+2'), 'w': np.float64(0.5)}]\n"
    )
    (item,) = items_of("scalars:items", tmp_path, need_prompt=True)
    assert item == {"prompt": "2+2", "w": 0.5} and [type(value) for value in item.values()] == [str, float]


def test_the_page_has_all_fields_with_their_defaults(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "train.md").read_text("utf-8")
    (shown,) = [block for block in page.split("```yaml\n")[1:] if block.startswith("model:")]
    written = shown.partition("```")[0]
    lines = [line for line in written.splitlines() if re.match(r"model:|data:|  train:|  reward:", line)]
    (tmp_path / "least.yaml").write_text("\n".join(lines))
    (tmp_path / "page.yaml").write_text(written)
    found, told = (read_configuration(tmp_path / f"{name}.yaml", [], TrainConfig).plain() for name in ("least", "page"))
    assert found == told
    named = yaml.safe_load(written)
    assert sorted(named) == sorted(found)
    groups = [name for name, value in named.items() if isinstance(value, dict)]
    assert {name: sorted(named[name]) for name in groups} == {name: sorted(found[name]) for name in groups}


def test_a_full_disk_is_named(config: Path) -> None:
    with TrainFolder(read_configuration(config, [], TrainConfig), resume=False) as folder:
        (folder.path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match=r"metrics.jsonl: No space left on device; mend that, and continue"):
            folder.append("metrics", [{"step": 0}])


def test_items_go_on_where_they_were_in_every_pass() -> None:
    items = ShuffledItems(list(range(10)), seed=1)
    taken = [one for _ in range(2) for (one,) in items]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10)) and taken[:10] != taken[10:]
    begun = iter(second := ShuffledItems(list(range(10)), seed=1))
    first = [one for (one,) in itertools.islice(begun, 4)]
    resumed = ShuffledItems(list(range(10)), seed=1)
    resumed.load_state_dict(second.state_dict())
    assert first + [one for _ in range(2) for (one,) in resumed] == taken


def test_an_item_that_is_a_list_stays_one() -> None:
    items: list[list[str]] = [["00+00=", "0"], [], ["one"]]
    source = ItemSource()
    source.use(ShuffledItems(items, seed=1))
    assert sorted(source.take() for _ in items) == sorted([item] for item in items)


def test_other_items_have_another_digest() -> None:
    digests = [ShuffledItems(items, seed=0).digest for items in (["1", "2"], ["2", "1"], ["1"], ["1", 2], [["1", "2"]])]
    assert len({*digests}) == 5 and digests[0] == ShuffledItems(["1", "2"], seed=1).digest


def test_a_loss_of_a_policy_can_be_trained_with() -> None:
    terms = {"entropy_bonus", "kl", "value_loss"}
    wrappers = {"combine", "icepop", "on_policy", "opsm", "sequence_mask", "sequence_mean", "tis"}
    no_losses = {"LossFn", "LossOutput", "sequence_level", "token_weights"}
    spellings = {"cispo_absolute"}
    public = {name for name, module in ops._MODULES.items() if module.startswith("rlcore.kernels.losses.")}
    assert public - terms - wrappers - no_losses - spellings == {*LOSSES}
