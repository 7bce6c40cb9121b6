"""Wrong calls of all kinds, over the command line and in a program: each is one line that says what is wrong, and
nothing is lost or left half-written. The rows are what a newcomer types, and what is told."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rlcore
from rlcore import ops, rollout
from rlcore.bench.case import select_cases
from rlcore.bench.record import read, write
from rlcore.cli import main as cli
from rlcore.compat import areal
from rlcore.configuration_file import read_configuration
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import RlcoreError
from rlcore.quickstart.config import QuickstartConfig
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.output import RunFolder
from rlcore.quickstart.policy import policy_class
from rlcore.settings import Settings
from rlcore.training.config import TrainConfig
from rlcore.training.run_folder import TrainFolder
from rlcore.types import IpcHandle
from tests.bench.records import a_record
from tests.rollout.simulated_engine import SimulatedEngine

USAGE = [
    ("frobnicate", "'frobnicate'"),
    ("--jsn", "--jsn"),
    ("quickstart --steps 0", "'--steps'"),
    ("quickstart --steps many", "'--steps'"),
    ("quickstart --steps 1.5", "'--steps'"),
    ("quickstart --seed -1", "'--seed'"),
    ("quickstart --seed 9223372036854775808", "'--seed'"),
    ("quickstart extra", "extra"),
    ("devices cpu npu", "npu"),
    ("ps --kill x", "'--kill'"),
    ("ops explain", "op"),
    ("ops explain linear_loss --hidden-size -1", "'--hidden-size'"),
    ("ops explain linear_loss --hidden-size x", "'--hidden-size'"),
    ("ops explain linear_loss --hidden-size 0", "'--hidden-size'"),
    ("ops explain linear_loss --vocab-size 0", "'--vocab-size'"),
    ("bench frobnicate", "'frobnicate'"),
    ("bench run --output", "'--output'"),
    ("bench run dispatch --rounds 0", "'--rounds'"),
    ("bench run dispatch --rounds x", "'--rounds'"),
    ("bench run dispatch --within 0", "'--within'"),
    ("bench run dispatch --within nan", "'--within'"),
    ("bench run dispatch --within inf", "'--within'"),
    ("bench compare", "records"),
    ("bench report", "records"),
    ("bench export", "record"),
    ("bench export a.json --format xml", "'--format'"),
    ("bench export a.json b.json", "b.json"),
    ("bench list extra", "extra"),
    ("bench run dispatch --rounds 99999999999", "'--rounds'"),
    ("bench run dispatch -o ''", "the path is empty; give a name, or . for this folder"),
    ("bench report a.json -o ''", "the path is empty; give a name, or . for this folder"),
    ("quickstart --model ''", "the path is empty; give a name, or . for this folder"),
    ("quickstart --output ''", "the path is empty; give a name, or . for this folder"),
    ("examples ''", "the path is empty; give a name, or . for this folder"),
    ("examples", "folder"),
    ("examples a b", "b"),
    ("plan", "--train"),
    ("plan --train -1", "'--train'"),
    ("plan --train 2 --host a", "host-a=cuda:8, got 'a'"),
    ("plan --train 2 --host a=cuda", "host-a=cuda:8, got 'a=cuda'"),
    ("plan --train 2 --host a=cuda:99999999999", "host-a=cuda:8, got 'a=cuda:99999999999'"),
    ("plan --train 2 --host a=cuda:2 --host a=cuda:4", "each host is named once, got a=cuda:2, a=cuda:4"),
    ("plan --train 2 --label rack", "rack=r7, got 'rack'"),
    ("plan --train 2 --num-hosts 0", "'--num-hosts'"),
    ("plan --train 2 --device cuda:1", "a kind such as cuda, without an index, got 'cuda:1'"),
    ("plan --train 2 --device ''", "a kind such as cuda, without an index, got ''"),
    ("plan --infer 3 --tensor-parallel 2", "a multiple of --tensor-parallel, got 3"),
    ("plan --train 2 --host a=cuda:2 --address auto", "--host"),
    ("ps --kill 1 --address auto", "--kill"),
    ("checkpoint verify", "'folder'"),
    ("checkpoint verify ''", "the path is empty; give a name, or . for this folder"),
    ("chaos --minutes nan", "--minutes"),
    ("chaos --fault magic", "no fault 'magic'"),
    ("version extra", "extra"),
    ("doctor --json extra", "extra"),
    ("trace", "give a program to run, or --report with the folder of a trace"),
    ("trace --report here true", "give a program to run, or --report with the folder of a trace"),
    ("trace --picture a.png true", "it draws the traces of --report, of which there may be several"),
    ("trace --report here --report mine", "it draws the traces of --report, of which there may be several"),
    ("trace -o '' true", "the path is empty; give a name, or . for this folder"),
    ("train", "config.yaml"),
    ("train ''", "the path is empty; give a name, or . for this folder"),
    ("plan ''", "the path is empty; give a name, or . for this folder"),
    ("plan m --memory inf", "'--memory'"),
    ("plan m --memory nan", "'--memory'"),
    ("plan m --count 99999999999999", "'--count'"),
    ("plan m --longest 1", "'--longest'"),
    ("plan m --lora 0", "'--lora'"),
    ("plan m --recompute maybe", "it must be one of off, selective, on, got 'maybe'"),
    ("plan m --optimizer sgd", "it must be one of adamw, adamw-fused, got 'sgd'"),
    ("plan m --num-hosts 2", "it is for the places of engines: give --train or --infer"),
    ("plan --train 2 --lora 8", "it is for a plan of memory, which needs model"),
    ("parity", "folder"),
    ("parity m --sequences 0", "'--sequences'"),
    ("parity m --sequences 99999999999999", "'--sequences'"),
    ("parity m --temperature nan", "'--temperature'"),
    ("parity m --threshold -1", "'--threshold'"),
    ("parity m --infer-option x", "give name=value, got 'x'"),
    ("parity m --prompts nowhere", "nowhere cannot be read as text"),
    ("parity m --prompts bytes.yaml", "bytes.yaml cannot be read as text"),
    ("parity m --prompts empty.json", "empty.json has no prompt; write one a line"),
    ("tune extra", "extra"),
    ("chaos --minutes inf", "--minutes"),
    ("quickstart --threads 0", "'--threads'"),
    ("quickstart --threads 9999", "'--threads'"),
]
"""Command, and what the last line on standard error names. Exit code 2."""

COMMANDS = [
    ("quickstart --device tpu", "no device 'tpu'; registered: cpu, cuda, npu"),
    ("quickstart --device ''", 'QuickstartConfig.device must be a name such as "cpu" or "cuda:1", or None, got \'\''),
    ("quickstart --device cuda:x", "a device is 'name' or 'name:index', such as 'cuda:1'; got 'cuda:x'"),
    ("quickstart --executor magic", "no inference executor 'magic'; registered: hf, sglang, vllm"),
    ("quickstart --executor ''", "QuickstartConfig.executor must be the name of an inference executor, such as"),
    ("quickstart --model nowhere", "model path '{here}/nowhere' is not a folder; rlcore does not download models: run"),
    ("quickstart --model text.json", "model path '{here}/text.json' is not a folder; rlcore does not download models"),
    ("quickstart --model mine", "{here}/mine has no config.json, so it is not a Hugging Face model folder"),
    ("quickstart --model wrong", "QuickstartPolicy cannot be made of {here}/wrong: RuntimeError: Trying to create"),
    ("quickstart --output text.json", "text.json exists and is not a quickstart run; use another --output"),
    ("quickstart --output text.json/below", "cannot make text.json/below: Not a directory; what was there before is"),
    ("quickstart --output mine", "mine exists and is not a quickstart run; use another --output"),
    ("quickstart --output run", "run holds another run (its own model, seed 0, 3 of 3 steps done); add --resume to"),
    (
        "quickstart --resume --output mine",
        "mine holds no run to resume: it has no run.json; give the --output of a run",
    ),
    ("quickstart --resume --output new", "new holds no run to resume: it has no run.json; leave out --resume to start"),
    (
        "quickstart --resume --output run --seed 1",
        "cannot resume run: it holds a run with seed 0, not 1; give the same",
    ),
    (
        "quickstart --resume --output run",
        "run/checkpoint/manifest.json has the format ''; this rlcore reads 'rlcore.checkpoint/4' and "
        "'rlcore.checkpoint/3'; use another checkpoint, or the rlcore that wrote this one",
    ),
    ("quickstart --resume --output damaged", "damaged/run.json cannot be read: JSON is malformed: invalid character"),
    ("trace nowhere.py", "the program to trace must be a Python file or a command, got 'nowhere.py', which is neither"),
    (
        "trace --report nowhere",
        "nowhere holds no trace: no file spans-*.jsonl of rlcore.trace/1 is there; give the fold",
    ),
    (
        "trace --report nowhere --picture a.png",
        "nowhere holds no trace: no file spans-*.jsonl of rlcore.trace/1 is there",
    ),
    ("trace -o text.json true", "the folder of the trace {here}/text.json cannot be made: File exists"),
    ("trace ./script", "./script cannot be run: Exec format error; trace a Python file, a program, or a script"),
    ("trace --report mine --record nowhere", "cannot read the benchmark record nowhere: No such file or directory"),
    ("devices tpu", "no device 'tpu'; registered: cpu, cuda, npu"),
    ("devices cpu:999", "device 'cpu:999' does not exist; cpu has"),
    ("devices cpu:x", "a device is 'name' or 'name:index', such as 'cuda:1'; got 'cpu:x'"),
    ("devices ''", "no device ''; registered: cpu, cuda, npu"),
    ("ps --kill 1", "no worker process has the id 1; living: "),
    ("ps --address ray://a:1", "address is that of a cluster, such as '10.0.0.1:6379', or 'auto', got 'ray://a:1'"),
    ("plan --train 1 --address ray://a:1", "address is that of a cluster, such as '10.0.0.1:6379', or 'auto', got 'r"),
    ("ps --kill 99999999", "no worker process has the id 99999999; living: "),
    ("plan --train 2 --host a=tpu:2", "no device 'tpu'; registered: cpu, cuda, npu. See `rlcore devices`."),
    ("plan --train 2 --host a=cuda:2 --device tpu", "no device 'tpu'; registered: cpu, cuda, npu. See `rlcore devic"),
    ("plan --train 2 --host a=cuda:1", "2 devices are needed and 1 can be used: a has cuda:0 (none is held)"),
    (
        "plan --train 3 --num-hosts 2 --host a=cuda:4",
        "3 workers in groups of 1 cannot be spread alike over num_hosts=2; give a num_hosts that divides 3, or none",
    ),
    ("plan --train 2 --host a=cuda:2 --strategy x", "strategy must be one of pack, spread, got 'x'"),
    ("plan --train 2 --host a=cuda:2 --label rack=r7", "no accepted host has host_labels rack=r7: a has none"),
    ("checkpoint verify nowhere", "nowhere is no folder; give the one that save() or export() wrote"),
    (
        "checkpoint verify mine",
        "mine is neither a checkpoint (no manifest.json) nor an export of rlcore (no rlcore-exp",
    ),
    ("quickstart --launcher magic", "launcher must be one of inline, process, ray, torchrun, got 'magic'"),
    ("ops explain matmul", "no operator 'matmul'; registered: discounted_return, gae, group_advantage, linear_logprob"),
    ("ops explain linear_loss --dtype int8", "--dtype must be one of float32, bfloat16, float16, float64, got 'int8'"),
    ("ops explain linear_loss --device tpu", "no device 'tpu'; registered: cpu, cuda, npu"),
    ("ops explain linear_loss --option entropi", "--option must be one of bias, entropy, group, memory_budget, seq"),
    ("ops explain gae --option entropy --device cpu", "--option must be left out for gae, got 'entropy'"),
    ("ops explain gae --implementation magic", "gae has no implementation 'magic'; registered: triton (on *, plugin"),
    ("bench run kernel", "no benchmark case 'kernel'; did you mean kernels"),
    ("bench run ''", "no benchmark case ''; there are folders attention, collectives, copies, dispatch"),
    ("bench run dispatch -o .", "cannot write the benchmark record .: it is a folder; give a file in it"),
    ("bench run dispatch -o nowhere/x.json", "cannot write the benchmark record nowhere/x.json: no folder nowhere"),
    ("bench run dispatch -o /dev/null", "cannot write the benchmark record /dev/null: it is a device or a pipe"),
    ("bench run dispatch -o b.json", "-o b.json exists; give another file, or --continue to go on with it, --force to"),
    ("bench run dispatch -o text.json --continue", "text.json is no rlcore.bench/1 record: JSON is malformed: invalid"),
    ("bench run dispatch -o b.json --continue --force", "--continue keeps what the file of -o holds, and --force repl"),
    ("bench run dispatch --continue", "--continue goes on with the record of -o; give that file"),
    ("bench run dispatch --quick --full", "--quick and --full contradict each other; give one of them"),
    ("bench run dispatch --device tpu", "no device 'tpu'; registered: cpu, cuda, npu"),
    ("bench compare a.json", "compare takes two records or more, got 1"),
    ("bench compare a.json a.json", "a.json is given twice; name each record once"),
    ("bench compare a.json nowhere.json", "cannot read the benchmark record nowhere.json: No such file or directory"),
    ("bench compare a.json mine", "cannot read the benchmark record mine: Is a directory"),
    ("bench compare a.json text.json", "text.json is no rlcore.bench/1 record: JSON is malformed: invalid character"),
    ("bench compare a.json empty.json", "empty.json is no rlcore.bench/1 record: Input data was truncated (line 1)"),
    ("bench compare a.json foreign.json", "foreign.json is no rlcore.bench/1 record: Invalid enum value 'asv/2' - at"),
    ("bench compare a.json nested.json", "nested.json is no rlcore.bench/1 record: Object contains unknown field"),
    ("bench compare . /", "cannot read the benchmark record .: Is a directory"),
    ("bench compare a.json huge.json", "huge.json has 260 MB; a record has at most 50 MB, so give a record"),
    ("bench compare a.json tiny.json", "tiny.json is no rlcore.bench/1 record: Expected `float` >= 1e-100 - at `$.cas"),
    (
        "bench compare a.json b.json --price x",
        "--price must be NAME=USD an hour and device, with one of the names a, b,",
    ),
    ("bench compare a.json b.json --price a=-1", "--price must be NAME=USD an hour and device, with one of the names"),
    (
        "bench compare a.json gpu.json --fail-on-regression",
        "--fail-on-regression takes runs of the same kind of device",
    ),
    ("bench report nowhere.json", "cannot read the benchmark record nowhere.json: No such file or directory"),
    ("bench report nested.json", "nested.json is no rlcore.bench/1 record: Object contains unknown field `a` (line"),
    ("bench report . /", "cannot read the benchmark record .: Is a directory"),
    ("bench report text.json", "text.json is no rlcore.bench/1 record: JSON is malformed: invalid character (byte 0)"),
    ("bench report a.json -o a.json --force", "-o a.json is one of the records; give another file for the page"),
    ("bench report a.json -o b.json", "-o b.json exists; give another file, or --force to replace it"),
    ("bench report a.json -o mine", "cannot write the report mine: Is a directory"),
    ("bench report a.json -o nowhere/x.html", "cannot write the report nowhere/x.html: No such file or directory"),
    (
        "bench report a.json -o x.html --price b=1",
        "--price must be NAME=USD an hour and device, with one of the names a",
    ),
    ("bench export nowhere.json", "cannot read the benchmark record nowhere.json: No such file or directory"),
    ("bench export text.json", "text.json is no rlcore.bench/1 record: JSON is malformed: invalid character (byte 0)"),
    ("examples text.json", "cannot write examples to text.json: File exists; give a folder that can be written to"),
    ("train nowhere.yaml", "cannot read the configuration nowhere.yaml: No such file or directory"),
    ("train mine", "cannot read the configuration mine: Is a directory"),
    ("train bytes.yaml", "bytes.yaml is no YAML: 'utf-8' codec can't decode byte 0xff"),
    ("train empty.json", "model is missing; it must be a text that is not empty"),
    ("train train.yaml output=", "output must be a text that is not empty, got None"),
    (
        "train train.yaml output=wrong",
        "wrong/config.json is not the configuration of a run of rlcore train; give anoth",
    ),
    ("train train.yaml output=wrong --resume", "wrong/config.json is not the configuration of a run of rlcore train"),
    ("train train.yaml output=mine", "mine exists and holds no run of rlcore train; give another output="),
    ("train train.yaml model=nowhere", "model path 'nowhere' is not a folder; rlcore does not download models"),
    ("train train.yaml data.train=nowhere.jsonl", "cannot read nowhere.jsonl: No such file or directory"),
    (
        "train train.yaml data.reward=nowhere:f",
        "cannot import nowhere:f: ModuleNotFoundError: No module named 'nowhere",
    ),
    ("train train.yaml algorithm.learning_rate=.inf", "algorithm.learning_rate must be a number above 0, got inf"),
    ("parity nowhere", "model path 'nowhere' is not a folder; rlcore does not download models: run `hf download"),
    ("parity mine", "mine has no config.json, so it is not a Hugging Face model folder"),
    ("parity wrong --dtype int8", "dtype must be one of float32, bfloat16, got 'int8'"),
    ("parity wrong", "ProbedPolicy cannot be made of wrong: RuntimeError: Trying to create tensor with negative dim"),
    ("tune --device cpu", "tuning cpu:0 is not supported: none of Triton's kernels runs there"),
    ("plan nowhere", "nowhere is no configuration of a model: FileNotFoundError"),
    ("plan wrong", "no model can be made of wrong: RuntimeError: Trying to create tensor with negative dimension -8"),
    ("plan text.json", "text.json is no configuration of a model: JSONDecodeError"),
    ("plan foreign.json", "foreign.json has no model_type; name the config.json of a Hugging Face model"),
    ("plan nowhere.yaml", "cannot read the configuration nowhere.yaml: No such file or directory"),
    ("plan open.yaml", "open.yaml is no YAML: while parsing a flow sequence"),
    (
        "checkpoint verify run",
        "run is neither a checkpoint (no manifest.json) nor an export of rlcore (no rlcore-expor",
    ),
    ("checkpoint verify text.json", "text.json is no folder; give the one that save() or export() wrote"),
    ("bench compare a.json b.json --price a=inf", "--price must be NAME=USD an hour and device, with one of the name"),
    ("bench report a.json a.json", "a.json is given twice; name each record once"),
    ("bench run dispatch -o circle", "cannot write the benchmark record circle: Too many levels of symbolic links"),
    ("bench run dispatch -o dangling", "cannot write the benchmark record dangling: no folder {here}/nowhere that can"),
    ("bench report a.json -o circle", "cannot write the report circle: Too many levels of symbolic links"),
    ("train deep.json", "deep.json is no YAML: maximum recursion depth exceeded"),
    ("train train.yaml data.train=deep.jsonl", "line 1 of deep.jsonl is no JSON: maximum recursion depth exceeded"),
    ("plan m --longest 99999999999999999999", "plan() takes a whole number from 1 to 16,777,216 as longest, got 99999"),
    (
        "plan m --max-tokens 99999999999999999999",
        "plan() takes a whole number from 1 to 16,777,216, or None as max_tok",
    ),
    ("plan deep.json", "deep.json is no configuration of a model: RecursionError: maximum recursion depth exceeded"),
    ("bench compare a.json deep.json", "deep.json is no rlcore.bench/1 record: "),
    ("bench export deep.json", "deep.json is no rlcore.bench/1 record: "),
    ("trace --report deep.json --picture a.png", "deep.json is no timeline that Timeline.save() wrote: "),
    ("trace --report a.json --picture text.json", "--picture text.json exists; give another file, or --force to repl"),
    (
        "trace -o . true",
        "{here}/trace.json was not written by rlcore trace, and its report would replace it; give another fol",
    ),
    ("quickstart --output theirs", "theirs/run.json cannot be read: it must have the fields"),
    ("train train.yaml output=unsaved", "unsaved has the metrics of 11 steps and no checkpoint, and one was due after"),
    (
        "train train.yaml output=unsaved --resume",
        "unsaved has the metrics of 11 steps and no checkpoint, and one was due after 10 steps; put unsaved/checkpoint",
    ),
    ("examples mine", "mine/researcher.py exists; give another folder, or --force to replace the examples in it"),
]
"""Command, and how the error begins. Exit code 1."""

CALLS = [
    ("get_device('tpu')", "no device 'tpu'; registered: cpu, cuda, npu"),
    ("get_device('cpu:-1')", "a device is 'name' or 'name:index', such as 'cuda:1'; got 'cpu:-1'"),
    ("get_device(3)", "a device is a name such as 'cuda' or 'cuda:1', a torch.device, or None for the default one; go"),
    ("init(launcher='magic')", "launcher must be one of inline, process, ray, torchrun, got 'magic'"),
    ("init(log='LOUD')", "RLCORE_LOG_LEVEL must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR', got 'LOUD'"),
    ("InferenceEngine('')", "InferenceEngine takes a non-empty str or Path as path, got ''"),
    ("InferenceEngine(None)", "InferenceEngine takes a non-empty str or Path as path, got None"),
    ("InferenceEngine(model, executor='magic')", "no inference executor 'magic'; registered: hf, sglang, vllm"),
    ("InferenceEngine(model).generate('1+1=')", "the inference engine is not built; call build() first"),
    ("build(dtype='int8')", 'dtype must be "auto" or a floating-point dtype such as "bfloat16", got \'int8\''),
    ("build(max_num_seqs='many')", "max_num_seqs must be a whole number of at least 1 or None, got 'many'"),
    ("build(colour='red')", "build() of the inference engine has no option 'colour'. It takes devices, launcher, colo"),
    ("build(timeout_s=0)", "timeout_s must be a positive number of seconds, got 0"),
    ("build(launcher='magic')", "launcher must be one of inline, process, ray, torchrun, got 'magic'"),
    ("build(tensor_parallel_size=0)", "tensor_parallel_size must be a whole number of at least 1, got 0"),
    ("build(data_parallel_size=-2)", "data_parallel_size must be a whole number of at least 1, got -2"),
    ("build(onload='yes')", "build() takes True or False as onload, got 'yes'"),
    ("build(host_memory_bytes=0)", "build() takes a whole number of at least 1, or None as host_memory_bytes, got 0"),
    ("build(reserve_host_bytes=1 << 62)", "reserve_host_bytes must be at most "),
    ("build(python='/nowhere/python')", "python='/nowhere/python' is no program; give the bin/python of an environmen"),
    ("infer.generate(3)", "prompts must be a text or a list of texts or of lists of token ids, got 3"),
    ("infer.generate('')", "prompt 0 is empty; give at least one token"),
    ("infer.generate([[10**9]])", "prompt 0 holds token id 1000000000; the model's token ids are 0 to 20"),
    ("infer.generate([[1.5]])", "prompt 0 must be a text or a list of token ids, got [1.5]"),
    ("infer.generate('1', {'colour': 1})", "unknown sampling parameter 'colour'; accepted: n, temperature"),
    ("infer.generate('1', {'temperature': -1})", "SamplingParams.temperature must be 0 (greedy) or at least 0.01, got"),
    ("infer.generate('1', {'max_tokens': 10**9})", "prompt 0 has 1 tokens and max_tokens is 1000000000, together 1000"),
    ("infer.generate('1', [{}, {}])", "got 2 sampling parameters for 1 prompts; give one or one each"),
    ("infer.generate('1', progress=3)", "generate() takes True or False, or None as progress, got 3"),
    ("infer.collect('x')", "collect() takes a finite number of at least 0, or None as timeout_s, got 'x'"),
    ("infer.pause('later')", "pause() takes one of abort, wait, keep, got 'later'"),
    ("infer.load('nowhere')", "model path 'nowhere' is not a folder; rlcore does not download models: run `hf downloa"),
    ("infer.load(3)", "load() takes a non-empty str or Path, or None as path, got 3"),
    ("infer.onload('optimizer')", "the inference engine has the tags weights, kv_cache; got 'optimizer'"),
    ("infer.build(devices='cpu')", "the inference engine is already built; make a new engine"),
    ("TrainEngine(None)", "TrainEngine takes a rlcore.nn.TrainModule, got NoneType; derive its class from"),
    ("train.call('nothing')", "QuickstartPolicy has no method 'nothing'"),
    ("train.call(3)", "call() takes a str as name, got 3"),
    ("train.call('set_rate', 1, gather='x')", "gather must be 'list', 'cat', 'first' or 'mean', got 'x'"),
    ("train.train_batch(None, ppo_clip())", "train_batch() takes a dict of tensors, as rlcore.collate() makes, as bat"),
    ("train.train_batch({}, ppo_clip())", "a batch needs input_ids; it has []"),
    ("train.train_batch(batch, None)", "train_batch() takes a function (logprob, entropy, per_token) -> (value, stats"),
    ("train.train_batch(batch, ppo_clip(), temperature=0)", "temperature must be a finite number > 0; got 0"),
    ("train.train_batch(batch, ppo_clip(), token_weights='mean')", "token_weights: mode must be one of token-mean"),
    ("changed(attention_mask=2 * batch['attention_mask'].long())", "pack: attention_mask must be 0 or 1 for each toke"),
    ("changed(loss_mask=batch['loss_mask'] * 0.5)", "loss_mask must be 0 or 1, or False or True, for each token, got"),
    ("changed(input_ids=batch['input_ids'] + 10**6)", "input_ids of sequence 0 holds 1000001; the model's vocabulary"),
    ("changed(advantages=torch.ones(99))", "pack: advantages must be one entry for each token, [4, 7] like attention_"),
    ("changed(advantages='x')", "batch entry 'advantages' must be a tensor or numbers, got 'x'"),
    ("train.forward_logprobs(batch, temperature=-1)", "temperature must be a finite number > 0; got -1"),
    ("train.save(None)", "save() takes a non-empty str or Path as folder, got None"),
    ("train.save('text.json')", "cannot write the checkpoint text.json"),
    ("train.save('/')", "cannot write the checkpoint /: / is the root of the file system: a checkpoint has a folder"),
    ("train.load('nowhere')", "no complete checkpoint in nowhere"),
    ("train.export(3)", "export() takes a non-empty str or Path as folder, got 3"),
    ("train.load_state_dict({})", "load_state_dict() needs exactly what state_dict() gives: missing: "),
    ("train.load_state_dict(times(float('nan')))", "load_state_dict() got NaN in model.embed_tokens.weight; give weig"),
    ("train.state_dict(adapters='some')", "state_dict() takes 'merged', 'base' or 'only' as adapters, got 'some'"),
    ("train.sync_weights(3)", "sync_weights() takes an inference engine or several different ones, got 3"),
    ("train.sync_weights(infer, version=-1)", "version must be a whole number of at least 0, or None, got -1"),
    ("train.sync_weights(infer, route='magic')", "route must be one of local, direct, packed, collective, relayed, o"),
    ("train.sync_weights(infer, verify='x')", "verify must be True or False, got 'x'"),
    ("train.sync_weights(infer, timeout_s=0)", "timeout_s must be a positive number of seconds, got 0"),
    ("swap(out=[3], in_=[])", "swap() takes pairs of an engine and its tags, such as (train, 'weights') or (train, ()"),
    ("offloaded(3).__enter__()", "offloaded() takes torch.nn.Module and torch.optim.Optimizer, got int"),
    ("WeightSender(None, None)", "WeightSender takes a torch.nn.Module, names and tensors in a mapping or as pairs"),
    ("WeightSender(state, None)", "WeightSender takes a channel with send() and recv(), or a WeightReceiver of this"),
    ("WeightReceiver(None, None)", "WeightReceiver takes a torch.nn.Module, a mapping of names to tensors, or a"),
    ("collate('x')", "collate() takes a list or tuple as outputs, got 'x'"),
    ("collate([])", "collate() needs at least one completion, got none"),
    (
        "collate(outputs, advantages=[1, 2, float('nan'), 4])",
        "collate() got nan among advantages, for completion 2; give finite numbers, or leave the completion out",
    ),
    ("collate(outputs, advantages=[1, 2, 3])", "collate() got 3 advantages for 4 completions; give one each"),
    ("SamplingParams.of(3)", "sampling parameters must be a mapping, None or rlcore's own SamplingParams, got"),
    ("ops.token_weights('token-mean', ones, total=0)", "token_weights: total must be above 0 where a token of mask co"),
    ("ops.token_weights('token-mean', [1])", "token_weights takes a tensor as mask, got [1]"),
    ("ops.token_logprob(torch.zeros(3, 3), 4 + ids)", "targets must be token ids in [0, 3) or ignore_index=-100; got"),
    ("ops.token_logprob(torch.zeros(3, 3), ids, implementation='magic')", "token_logprob has no implementation 'magic"),
    ("ops.linear_logprob(torch.zeros(3, 4), torch.zeros(3, 5), ids)", "weight must be [V, H] with H = 4; got [3, 5]"),
    ("ops.group_advantage(ones * float('nan'), group_size=3)", "group_advantage: rewards must be finite; got nan at ["),
    ("ops.gae(ones[None], ones[None], gamma=2.0, lam=0.9)", "gae: gamma must be in [0, 1]; got 2.0"),
    ("ops.ppo_clip(clip_low=-1)", "ppo_clip: clip_low must be in [0, 1]; got -1"),
    ("ops.kl(kind='k9', coef=0.1)", "kl: kind must be one of k1, k2, k3"),
    ("ops.pack({})", "pack needs a batch with attention_mask [N, L]; got []"),
    ("ops.balance([3, 5], max_tokens=4)", "balance: sequence 1 has 5 tokens, more than max_tokens=4; raise max_tokens"),
    ("IpcHandle.from_bytes(b'x')", "these 1 bytes are no IpcHandle: "),
    ("device.memory.import_ipc(None)", "import_ipc takes an IpcHandle, got NoneType; bytes become one by IpcHandle.fr"),
    ("device.memory.host_alloc(-1)", "host_alloc takes a whole number of at least 1 byte, got -1"),
    ("device.memory.copy_batch([ones], [ones[:2]])", "copy_batch takes pairs of equal shape and dtype, got float32 [3"),
    ("device.seed('x')", "seed takes a whole number of at most 64 bits as value, got 'x'"),
    ("read(Path('text.json'))", "text.json is no rlcore.bench/1 record: JSON is malformed: invalid character (byte 0)"),
    ("select_cases(['kernel'])", "no benchmark case 'kernel'; did you mean kernels"),
    ("QuickstartConfig(seed=-1)", "QuickstartConfig.seed must be a whole number in [0, 2**63), got -1"),
    ("init(trace=3)", "init() takes a non-empty str or Path, or None as trace, got 3"),
    ("init(trace='text.json')", "a trace is a folder that can be written, got '/"),
    ("init(address=3)", "init() takes a str, or None as address, got 3"),
    ("init(address='ray://a:1')", "address is that of a cluster, such as '10.0.0.1:6379', or 'auto', got 'ray://a:1'"),
    ("init(launcher='process', address='auto')", "address is that of a Ray cluster, for launcher='ray', got launcher="),
    ("init(insecure_cluster='yes')", "init() takes True or False as insecure_cluster, got 'yes'"),
    ("init(devices=3)", "init() takes a device's name or a list of them, or None as devices, got 3"),
    ("build(strategy='pack')", "strategy='pack' needs a launcher with several hosts: launcher='ray'"),
    ("build(acceptable_node_ips=['x'])", "acceptable_node_ips must hold IP addresses, got 'x'"),
    ("build_train(sequence_parallel_size=0)", "sequence_parallel_size must be a whole number of at least 1, got 0"),
    ("build_train(sequence_parallel_size=True)", "sequence_parallel_size must be a whole number of at least 1, got Tr"),
    ("build_train(sequence_parallel_size=2)", "this engine has 2 workers; devices names 1: ['cpu:0']"),
    ("build_train(tensor_parallel_size='2')", "tensor_parallel_size must be a whole number of at least 1, got '2'"),
    ("build_train(expert_parallel_size=2)", "expert_parallel_size=2 must be a multiple of tensor_parallel_size=1, and"),
    ("build_train(replicas=1.5)", "replicas must be a whole number of at least 1, got 1.5"),
    ("build_train(executor='deepspeed', stage=4)", "stage must be 1, 2 or 3, the stage of ZeRO, got 4"),
    ("build_train(executor='deepspeed', config={'fp16': {}})", "config may not have 'fp16': there is no loss scaling"),
    ("build_train(executor='deepsped')", "no train executor 'deepsped'; registered: deepspeed, fsdp2"),
    ("train.sync_weights(infer, delta='yes')", "delta must be True or False, got 'yes'"),
    ("train.sync_weights(infer, checksums='md5')", "checksums must be one of off, sample, always, got 'md5'"),
    ("train.sync_weights(infer, staging_bytes=0)", "a staging buffer must be a multiple of 512 bytes and at least 102"),
    ("RolloutController(3, workflow, batch_size=2)", "RolloutController takes an InferenceEngine or several different"),
    ("RolloutController(InferenceEngine(model), workflow, batch_size=2)", "RolloutController takes inference engines "),
    ("RolloutController(infer, SingleTurn, batch_size=2)", "RolloutController takes a Workflow, with `async def run_e"),
    ("controlled(batch_size=0)", "RolloutController takes a whole number of at least 1 as batch_size, got 0"),
    ("controlled(max_staleness=1.5)", "RolloutController takes a whole number of at least 0 as max_staleness, got 1.5"),
    ("controlled(max_concurrent=0)", "RolloutController takes a whole number of at least 1, or None as max_concurrent"),
    ("controlled(tokenizer='x')", "RolloutController takes a tokenizer of transformers, or None as tokenizer, got 'x'"),
    ("controlled(episode_timeout_s=True)", "RolloutController takes a number of seconds above 0 as episode_timeout_s,"),
    ("controlled(episode_timeout_s=0)", "RolloutController takes a number of seconds above 0 as episode_timeout_s, go"),
    ("controlled(sampling_params={'colour': 1})", "unknown sampling parameter 'colour'; accepted: n, temperature"),
    ("controlled(chat_template=3)", "RolloutController takes a str, or None as chat_template, got 3"),
    ("controlled(template_options=3)", "RolloutController takes a mapping, or None as template_options, got 3"),
    ("rollout.wait(0)", "wait() takes a whole number of at least 1, or None as count, got 0"),
    ("rollout.wait(1)", "wait(1) would wait for ever: only 0 episodes were submitted and not given yet; submit() more"),
    ("rollout.wait(1, timeout_s=-1)", "wait() takes a finite number of at least 0, or None as timeout_s, got -1"),
    ("rollout.prepare_batch(3)", "prepare_batch() takes a dataloader, or a list of items, got 3"),
    ("rollout.rollout_batch('ab')", "rollout_batch() takes a list or tuple as items, got 'ab'"),
    ("rollout.rollout_batch([])", "rollout_batch() needs at least one item, got none"),
    ("rollout.evaluate(['1'], workflow=3)", "evaluate() takes a Workflow, with `async def run_episode(client, data)`"),
    ("rollout.evaluate([])", "evaluate() needs at least one item, got none"),
    ("rollout.prepare_batch('items.jsonl')", "prepare_batch() takes a dataloader, or a list of items, got 'items"),
    ("rollout.prepare_batch({'prompt': '1'})", "prepare_batch() takes a dataloader, or a list of items, got {'prompt'"),
    ("rollout.timeline.save('nowhere/x.json')", "cannot write the timeline nowhere/x.json: No such file or directory"),
    ("rollout.timeline.save('mine')", "cannot write the timeline mine: Is a directory"),
    ("closed().update_weights(train)", "update_weights() is refused: the RolloutController is closed; make another"),
    ("closed().generation_paused().__enter__()", "generation_paused() is refused: the RolloutController is closed"),
    ("closed().evaluate([1])", "evaluate() is refused: the RolloutController is closed; make another"),
    ("MultiTurn(len, {'max': max})", "MultiTurn needs tool_descriptions= for the tool 'max': no signature found for b"),
    ("rollout.set_version(-1)", "set_version(-1) must be the version that the engines serve, [0]: give sync_weights(v"),
    ("rollout.update_weights(3)", "update_weights() takes a TrainEngine as train, got 3"),
    ("rollout.update_weights(train, version=-1)", "update_weights() takes a version of at least 0, the version of now"),
    ("rollout.load_state_dict({})", "load_state_dict() takes what state_dict() returned, got {}"),
    ("loaded(queued=[3])", "load_state_dict() takes what state_dict() returned: Expected `array`, got `int` - at `$.q"),
    ("loaded(ready=[[0, {}, [{}]]])", "load_state_dict() takes what state_dict() returned: Object missing required fi"),
    ("loaded(next_number='x')", "load_state_dict() takes what state_dict() returned: Expected `int`, got `str` - at `"),
    ("loaded(source=3)", "load_state_dict() takes what state_dict() returned: Expected `object`, got `int` - at `$.so"),
    ("SingleTurn(3)", "SingleTurn takes a function as reward, got 3"),
    ("SingleTurn(max, {'temperature': -1})", "SamplingParams.temperature must be 0 (greedy) or at least 0.01, got -1"),
    ("SingleTurn(max, is_group_reward='x')", "SingleTurn takes True or False as is_group_reward, got 'x'"),
    ("MultiTurn(max, 3)", "MultiTurn takes a mapping of names to functions as tools, got 3"),
    ("MultiTurn(max, {'search': 3})", "MultiTurn takes a mapping of names to functions as tools, got {'search': 3}"),
    ("MultiTurn(max, {}, tool_descriptions=3)", "MultiTurn takes a list or tuple, or None as tool_descriptions, got 3"),
    ("MultiTurn(max, {}, max_turns=0)", "MultiTurn takes a whole number of at least 1 as max_turns, got 0"),
    ("Grouped(3, 4)", "Grouped takes a Workflow, with `async def run_episode(client, data)`, as workflow, got 3"),
    ("Grouped(workflow, 0)", "Grouped takes a whole number of at least 1 as n, got 0"),
    ("RewardPool(0)", "RewardPool takes a whole number of at least 1 as num_processes, got 0"),
    ("RewardPool(1).submit(3)", "RewardPool.submit() takes a function as function, got 3"),
    ("StalenessBound(max_staleness=1, batch_size=1).end(3)", "end() takes the number of an episode that runs, got 3"),
    ("StalenessBound(max_staleness=1, batch_size=1).give([5])", "give() takes numbers of episodes that are ready, got"),
    ("StalenessBound(max_staleness=1, batch_size=1).choose(-1)", "choose() takes a whole number of at least 1 as coun"),
    ("collate_trajectories([[3]])", "collate_trajectories() takes a list or tuple of lists of Trajectory as groups, g"),
    ("collate_trajectories([[]])", "collate_trajectories() needs at least one trajectory, got none"),
    ("areal.load_expr_config([], areal.GRPOConfig)", "load_expr_config() takes --config FILE.yaml and then key=value"),
    ("configured('nowhere.yaml')", "cannot read the configuration nowhere.yaml: No such file or directory"),
    ("configured('mine')", "cannot read the configuration mine: Is a directory"),
    ("configured('text.json')", "text.json must hold fields and their values, got 'hello'"),
    ("configured('open.yaml')", "open.yaml is no YAML: while parsing a flow sequence"),
    ("configured('bytes.yaml')", "bytes.yaml is no YAML: "),
    ("configured('empty.json', 'seed')", "an override must be key=value, got 'seed'"),
    ("configured('empty.json', '=3')", "an override must be key=value, got '=3'"),
    ("configured('empty.json', 'seed=[')", "the value of the override 'seed=[' is no YAML; quote it"),
    ("configured('empty.json', 'seed=1', 'seed.x=2')", "the override 'seed.x=2' goes into 'seed', which is 1"),
    ("configured('empty.json', 'actor=3')", "actor must be a mapping, got 3"),
    ("configured('empty.json', 'sed=2')", "sed is no field here; did you mean 'seed'? accepted: experiment_name"),
    ("areal.WeightUpdateMeta('tape')", "WeightUpdateMeta(type='tape') is not supported: 'disk', 'nccl' and 'xccl' are"),
    ("areal.RemoteInfEngine(None)", "RemoteInfEngine takes an InferenceEngineConfig as config, got None"),
    ("areal.RemoteInfEngine(areal.InferenceEngineConfig()).wait(1)", "the rollout engine is not initialized; call ini"),
    ("areal.FSDPPPOActor(None)", "FSDPPPOActor takes a PPOActorConfig as config, got None"),
    ("actor('nowhere').initialize()", "model path 'nowhere' is not a folder; rlcore does not download models: run"),
    ("actor('x').compute_advantages({})", "the batch needs rewards, logprobs, loss_mask; rewards, logprobs, loss_mask"),
    ("actor('x').ppo_update({})", "the batch needs logprobs, advantages; logprobs, advantages is missing"),
    ("areal.PPOActorConfig(group_size='x')", "actor.ppo_n_minibatches and actor.group_size must be whole numbers of a"),
    ("areal.FinetuneSpec(1, 2, 0)", "a FinetuneSpec takes whole numbers of at least 1, got FinetuneSpec(total_train_e"),
    ("areal.RLVRWorkflow(3, areal.GenerationHyperparameters(), None)", "RLVRWorkflow takes a function as reward_fn, g"),
    ("plan(None)", "a plan takes a model folder, a config.json, transformers' configuration, or a TrainModule made un"),
    ("plan(model, count=1 << 40)", "plan() takes a whole number from 1 to 1,048,576, or None as count, got 1099511627"),
    ("plan(model, memory_bytes=-1)", "plan() takes a whole number of at least 1, or None as memory_bytes, got -1"),
    ("plan(model, optimizer='adam')", "plan() takes a function, or None as optimizer, got 'adam'"),
    ("plan(model, device='h900')", "no device 'h900' is known or here; did you mean 'h200'?; known without being here"),
    ("NeedParallel(3)", "NeedParallel takes a list, tuple, tensor or dict of them, got int"),
    ("connect_control('a:1', timeout_s=-1)", "connect_control() takes a finite number of at least 0 as timeout_s"),
    ("accept_controls(3)", "accept_controls() takes a non-empty str or Path as address, got 3"),
    ("offloaded().__enter__()", "offloaded() takes modules with parameters, or optimizers; got none"),
    ("swap(out=[(train, 'weights')], in_=[(train, 'weights')])", "swap() moves a tag once; 'weights' of the train"),
    ("train.train('yes')", "train() takes True or False as mode, got 'yes'"),
    ("train.train_batch([batch], ppo_clip())", "train_batch() takes a dict of tensors, as rlcore.collate() makes, as "),
    ("train.train_batch(batch, lambda a, b, c: 3)", "loss function <lambda> must return (value, stats), a vector and "),
    ("train.train_batch(batch, lambda a, b, c: (a.sum(), {}))", "loss function <lambda>: its value must be a vector "),
    ("train.train_batch(batch, lambda a, b, c: (a.detach(), {}))", "loss function <lambda>: its value depends on ne"),
    ("train.save('x', {1: 2})", "save() cannot keep extra = {1: 2}, which would not come back equal. Accepted are"),
    ("train.load('text.json')", "the checkpoint text.json is damaged: text.json/manifest.json: [Errno 20] Not a dir"),
    ("changed(advantages=batch['advantages'] * float('inf'))", "advantages of sequence 0 is inf on a token that is"),
    ("changed(input_ids=batch['input_ids'].float())", "input_ids must be whole numbers, got torch.float32"),
    ("infer.generate([None])", "prompt 0 must be a text or a list of token ids, got None; with images it is a dict th"),
    ("infer.generate('1', {'top_p': 2})", "SamplingParams.top_p must be in (0, 1], got 2"),
    ("infer.generate('1', {'stop': ['x']})", "unknown sampling parameter 'stop'; did you mean 'stop_token_ids'? ac"),
    ("infer.abort('x')", "abort() takes a list of numbers that submit() gave, or None as numbers, got 'x'"),
    ("device.memory.host_alloc(1 << 62)", "4611686018427387904 bytes of host memory could not be had: [Errno 12] "),
    ("ops.balance([1.5], max_tokens=4)", "balance: lengths must be whole numbers >= 0; got 1.5"),
    ("ops.group_advantage(ones, group_size=2)", "group_advantage: group_size=2 does not divide 3 rewards"),
    ("ops.combine(3)", "combine takes a function of (logprob, entropy, per_token), such as ppo_clip(), as term 0, got"),
    ("Settings.from_env({'RLCORE_CLOUR': 'x'})", "unknown environment variable RLCORE_CLOUR; rlcore reads RLCORE_DEVI"),
]  # fmt: skip
"""Call, and how the error begins."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_model(seed=0, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder of work that nothing may harm."""
    here = tmp_path_factory.mktemp("work")
    (here / "text.json").write_text("hello")
    (here / "script").write_text("echo hello\n")
    (here / "script").chmod(0o755)
    (here / "mine").mkdir()
    (here / "mine" / "researcher.py").write_text("years of work")
    for name, record in {"a": a_record(), "b": a_record(2.0), "gpu": a_record(accelerator_model_name="GPU")}.items():
        write(record, here / f"{name}.json")
    (here / "empty.json").write_bytes(b"")
    (here / "items.jsonl").write_text('{"prompt": "1+1="}\n')
    (here / "train.yaml").write_text(
        f"model: {model}\noutput: new\ndata: {{train: items.jsonl, reward: 'math:fsum'}}\n"
    )
    (here / "open.yaml").write_text("actor: [1")
    (here / "bytes.yaml").write_bytes(b"\xff\xfe\x01")
    (here / "nested.json").write_text(f'{{"a": {"[" * 100_000}{"]" * 100_000}}}')
    (here / "foreign.json").write_text('{"schema": "asv/2"}')
    (here / "deep.json").write_text("[" * 100_000)
    (here / "deep.jsonl").write_text("[" * 100_000)
    (here / "trace.json").write_text("years of work")
    with (here / "huge.json").open("wb") as file:
        file.truncate(260_000_000)
    tiny = json.loads((here / "a.json").read_bytes())
    tiny["cases"][0]["metrics"][0]["samples"] = [5e-324] * 3
    (here / "tiny.json").write_text(json.dumps(tiny))
    shutil.copytree(model, here / "wrong")
    config = json.loads((here / "wrong" / "config.json").read_bytes())
    (here / "wrong" / "config.json").write_text(json.dumps(config | {"hidden_size": -8}))
    with RunFolder(QuickstartConfig(output=here / "run", device="cpu", steps=3)) as run:
        run.begin()
        for step in range(4):
            run.append({"step": step, "reward": 0.5})
        run.checkpoint.mkdir()
        (run.checkpoint / "manifest.json").write_text("{}")
    (here / "circle").symlink_to("circle")
    (here / "dangling").symlink_to("nowhere/x.json")
    (here / "theirs").mkdir()
    (here / "theirs" / "run.json").write_text('{"name": "years of work"}')
    with TrainFolder(
        read_configuration(here / "train.yaml", [f"output={here / 'unsaved'}"], TrainConfig), resume=False
    ) as train:
        train.begin()
        train.append("metrics", [{"step": step} for step in range(12)])
    shutil.copytree(here / "run", here / "damaged")
    (here / "damaged" / "run.json").write_text("hello")
    return here


def contents(folder: Path) -> dict[Path, bytes | None]:
    files = (path for path in sorted(folder.rglob("*")) if path.name != "huge.json")
    return {path: path.read_bytes() if path.is_file() else None for path in files}


@pytest.fixture
def here(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test leaves it as it was."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RLCORE_CACHE", str(model.parents[1]))
    monkeypatch.setenv("RLCORE_DEVICE", "cpu")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def test_there_are_350_of_them() -> None:
    assert len({call for call, _ in USAGE + COMMANDS + CALLS}) == len(USAGE + COMMANDS + CALLS) >= 350


def test_wrong_usage_names_what_is_wrong(here: Path) -> None:
    for command, named in USAGE:
        found = CliRunner().invoke(cli.app, shlex.split(command))
        assert (found.exit_code, found.stdout) == (2, ""), command
        last = found.stderr.splitlines()[-1]
        assert last.startswith("Error: ") and named in last.lower(), command  # typer writes some in capitals


@pytest.mark.parametrize(("command", "told"), COMMANDS)
def test_a_wrong_command_is_one_line_and_harms_nothing(here: Path, command: str, told: str) -> None:
    found = CliRunner().invoke(cli.app, shlex.split(command))
    assert isinstance(found.exception, RlcoreError), found.exception
    assert str(found.exception).startswith(told.format(here=here)), str(found.exception)
    assert len(str(found.exception).splitlines()) == 1
    assert found.stdout == ""


@pytest.fixture(scope="module")
def names(model: Path) -> Iterator[dict[str, Any]]:
    """Everything that ``CALLS`` name."""
    with rlcore.meta_device():
        module = policy_class(model).from_pretrained(model)
    workflow = rollout.SingleTurn(len)

    def loaded(**entries: Any) -> None:
        """A state of a rollout that is damaged."""
        with rollout.RolloutController(SimulatedEngine(), workflow, batch_size=2) as other:
            other.load_state_dict(other.state_dict() | entries)

    def closed() -> rollout.RolloutController:
        found = rollout.RolloutController(SimulatedEngine(), workflow, batch_size=2)
        found.close()
        return found

    with contextlib.ExitStack() as stack:
        train = stack.enter_context(rlcore.TrainEngine(module)).build(devices="cpu")
        infer = stack.enter_context(rlcore.InferenceEngine(model)).build(devices="cpu")
        controller = stack.enter_context(rollout.RolloutController(SimulatedEngine(), workflow, batch_size=2))
        outputs = infer.generate(["1+1=", "2+2="], {"n": 2, "max_tokens": 3, "ignore_eos": True})
        batch = rlcore.collate(outputs, advantages=[1.0, 2.0, 3.0, 4.0])
        state = train.state_dict()
        yield {
            **{name: getattr(rlcore, name) for name in rlcore.__all__},
            **{value.__name__: value for value in (SamplingParams, IpcHandle, QuickstartConfig, Settings, Path)},
            **{"ops": ops, "ppo_clip": ops.ppo_clip, "torch": torch, "read": read, "select_cases": select_cases},
            **{"model": model, "train": train, "infer": infer, "outputs": outputs, "batch": batch, "state": state},
            **{name: getattr(rollout, name) for name in rollout.__all__},
            **{"areal": areal, "rollout": controller, "workflow": workflow, "loaded": loaded, "closed": closed},
            "controlled": lambda **options: rollout.RolloutController(infer, workflow, **{"batch_size": 2, **options}),
            "configured": lambda *argv: areal.load_expr_config(["--config", *argv], areal.GRPOConfig),
            "actor": lambda path: areal.FSDPPPOActor(areal.PPOActorConfig(path=path)),
            "build_train": lambda executor="fsdp2", **options: rlcore.TrainEngine(module, executor=executor).build(
                devices="cpu", **options
            ),
            "build": lambda **options: rlcore.InferenceEngine(model).build(devices="cpu", **options),
            "changed": lambda **entries: train.train_batch(batch | entries, ops.ppo_clip()),
            "times": lambda factor: {name: value * factor for name, value in state.items()},
            "device": rlcore.get_device("cpu"),
            "ones": torch.ones(3),
            "ids": torch.arange(3),
        }


def test_a_wrong_call_is_one_line_and_harms_nothing(here: Path, names: dict[str, Any]) -> None:
    before = names["infer"].generate("1+1=", {"seed": 0, "max_tokens": 4})
    for call, told in CALLS:
        with pytest.raises(RlcoreError) as caught:
            eval(call, names)
        assert str(caught.value).startswith(told), f"{call}: {caught.value}"
        assert len(str(caught.value).splitlines()) == 1, call
    assert names["infer"].generate("1+1=", {"seed": 0, "max_tokens": 4}) == before
    assert all(torch.equal(value, names["state"][name]) for name, value in names["train"].state_dict().items())
    assert names["train"].train_batch(names["batch"], ops.ppo_clip())["num_tokens"] == 12
