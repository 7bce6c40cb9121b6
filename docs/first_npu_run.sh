#!/usr/bin/env bash
# For the first person with an NPU: everything that rlcore can say of it, in one file to send back.
#
#     bash docs/first_npu_run.sh                  all steps; Ctrl-C packs what is done so far
#     bash docs/first_npu_run.sh doctor bench     some of them
#
# DEVICE (npu; DEVICE=cpu tries the script itself), PYTHON (python), STEPS of the quickstart (20), MODEL of the
# quickstart (its own), CASES of the benchmark (those below), LIMIT in seconds of each step (3600).
# What fails, hangs or is not there is recorded, and the next step goes on. Of the environment only a fixed list of
# variables is recorded (rlcore/doctor/secrets.py), and what else repeats a secret is taken out before packing.
set -u
all="npu-smi packages doctor devices conformance operators pair quickstart bench"
cases="product/sweep memory/bandwidth copies/to_device copies/to_host copies/peers attention/forward
    kernels/token_logprob kernels/linear_logprob/8b kernels/linear_loss/8b kernels/token_loss
    kernels/gae kernels/discounted_return kernels/group_advantage
    collectives/all_reduce collectives/all_gather collectives/reduce_scatter collectives/broadcast
    collectives/all_to_all offload/cycle weight_sync/dense rl/step"
device=${DEVICE:-npu} python=${PYTHON:-python} limit=${LIMIT:-3600}
if ! "$python" -m rlcore version > /dev/null; then
    echo "$python cannot run rlcore: activate its environment, or name its interpreter by PYTHON=..." >&2
    exit 2
fi
for name in "$@"; do
    case " $all " in *" $name "*) ;; *) echo "there is no step '$name'; the steps are $all" >&2; exit 2 ;; esac
done
folder="rlcore-$device-$(date -u +%Y%m%dT%H%M%SZ)"
mkdir "$folder" || exit 2
chosen=" $* "

pack() {
    rm -rf "$folder/quickstart/checkpoint" "$folder/quickstart/model"
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$python" -m rlcore.doctor.secrets "$folder" || exit 1  # not packed with secrets
    tar -czf "$folder.tar.gz" "$folder" && echo "Please attach $folder.tar.gz to an issue."
}

stop() {  # the step that was interrupted has ended by now
    echo "interrupted during $step after $((SECONDS - begun)) s" | tee -a "$folder/steps.txt"
    pack
    exit 130
}
step=start begun=$SECONDS
trap stop INT TERM

record() {  # name, command...
    local code
    step=$1 begun=$SECONDS
    shift
    case $chosen in *" $step "* | "  ") ;; *) return ;; esac
    printf '== %s ' "$step"
    "$@" > "$folder/$step.txt" 2>&1
    code=$?
    printf '%s: exit code %s, %s s\n' "$step" "$code" "$((SECONDS - begun))" >> "$folder/steps.txt"
    echo "exit code $code"
}

bounded() {  # in the foreground, so that Ctrl-C reaches it
    timeout --foreground --kill-after 30 "$limit" "$@"
}

operators() {  # every implementation of every operator on the device, against its definition in float64 on the CPU
    bounded "$python" - "$device" <<'PYTHON'
import sys

import torch

import rlcore
from rlcore.errors import UnsupportedError
from rlcore.kernels.losses.evaluate import TokenInputs, values_and_gradients, weighted_sum
from rlcore.ops import combine, discounted_return, entropy_bonus, gae, group_advantage, kl
from rlcore.ops import linear_logprob, linear_loss, ppo_clip, token_logprob
from rlcore.packed import choice
from rlcore.registry import registry

where = rlcore.get_device(sys.argv[1]).torch_device
bounds = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # of the relative error: norm of the difference / norm
torch.manual_seed(0)
T, H, V = 300, 256, 5003
hidden, weight, targets = torch.randn(T, H), torch.randn(V, H) / 16, torch.randint(V, (T,))
values, rewards, mask = torch.randn(T), torch.randn(T), torch.rand(T) > 0.2
edges = torch.tensor([0, 1, 40, 45, T])
old = torch.log_softmax(hidden @ weight.T, -1)[range(T), targets] + 0.05 * values.clamp(-1, 1)  # no ratio is clipped
per_token = {"old_logprobs": old, "ref_logprobs": old + 0.05, "advantages": rewards}
loss_fn = combine(ppo_clip(), kl(coef=0.01), entropy_bonus(coef=0.01))
share = torch.full((T,), 1 / T)


def like(x, there):  # to where the others are; floating ones wide there too, if they are
    return x.to(there.device, torch.float64 if x.is_floating_point() and there.dtype == torch.float64 else x.dtype)


def per_token_like(there):
    return {name: like(x, there) for name, x in per_token.items()}


def of_linear_loss(h, w, **by):
    options = {"per_token": per_token_like(h), "token_weight": like(share, h), "cu_seqlens": edges}
    return [linear_loss(h, w, like(targets, h), loss_fn, **options, **by).loss]


def of_token_loss(logprob, entropy):
    counted = TokenInputs.of(per_token_like(logprob), like(share * mask, logprob), like(mask, logprob))
    values, _, *gradients = values_and_gradients(loss_fn, logprob, entropy, counted, {})
    return [weighted_sum(values, counted), *gradients]


calls = {  # operator: its tensors, what it gives of them; what has gradients is held against those too
    "token_logprob": ([hidden @ weight.T], lambda x, **by: token_logprob(x, like(targets, x), with_entropy=True, **by)),
    "linear_logprob": (
        [hidden, weight], lambda h, w, **by: linear_logprob(h, w, like(targets, h), with_entropy=True, **by)
    ),
    "linear_loss": ([hidden, weight], of_linear_loss),
    "gae": (
        [values, rewards], lambda v, r, **by: gae(v, r, like(mask, v), gamma=0.99, lam=0.95, cu_seqlens=edges, **by)
    ),
    "discounted_return": (
        [rewards], lambda r, **by: [discounted_return(r, like(mask, r), gamma=0.99, cu_seqlens=edges, **by)]
    ),
    "group_advantage": ([rewards], lambda r, **by: [group_advantage(r.detach(), group_size=10, **by)]),
}


def results(call, leaves, **by):
    leaves = [x.clone().requires_grad_() for x in leaves]
    found = list(call(*leaves, **by))
    if any(x.requires_grad for x in found):
        sum(x.sum() for x in found).backward()
    found += [x.grad for x in leaves if x.grad is not None]
    return [x.detach().cpu().double() for x in found]


def verdict(name, tensors, dtype, call, **by):
    try:
        tensors = [x.to(where, dtype) for x in tensors]
        found = results(call, tensors, **by)
        right = results(call, [x.cpu().double() for x in tensors], **(by and {"implementation": "reference"}))
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]
        told = "relative errors " + " ".join(f"{error:.1e}" for error in errors)
        if all(error <= bounds[dtype] for error in errors):
            return f"{told}, all within {bounds[dtype]:.0e}"
        return f"FAILED: {told}, not all within {bounds[dtype]:.0e}"
    except UnsupportedError as error:
        return f"refused: {error.reason}"
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def of_attention(name, window, dtype):  # by the package's own probe: forward and backward against plain torch there
    if name == "per_sequence":
        return "not held against anything: it is the model's own, a sequence at a time"
    reason = choice.why_not(name, choice.AttentionCall(8, 2, 128, 128, window=window), where, dtype)
    if reason is None:
        return f"right, relative errors within {choice._TOLERANCE[dtype]:.0e}"
    return f"FAILED: {reason}" if "gave a wrong" in reason else f"refused: {reason}"


lines = []


def tell(line):
    lines.append(line)
    print(line, flush=True)


for dtype in bounds:
    for name, (tensors, call) in calls.items():
        for entry in registry().ops[name]:
            tell(f"{name} {entry.name} {dtype}: {verdict(name, tensors, dtype, call, implementation=entry.name)}")
    for name in choice.implementations(where.type):
        for window in (None, 64):
            tell(f"packed_attention {name} window={window} {dtype}: {of_attention(name, window, dtype)}")
tell(f"token_loss torch.float32: {verdict('token_loss', [old, -old], torch.float32, of_token_loss)}")
sys.exit(any(": FAILED: " in line for line in lines))
PYTHON
}

pair() {  # two devices: FSDP2 over both against the CPU, and weights from process to process by every route
    bounded "$python" - "$device" <<'PYTHON'
import sys

import torch

import rlcore
from rlcore.errors import RlcoreError, UnsupportedError
from rlcore.ops import ppo_clip
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.policy import policy_class

STEPS, BOUND = 4, 1e-3
kind = sys.argv[1].partition(":")[0]
if rlcore.get_device(kind).count() < 2 and kind != "cpu":
    print(f"not run: there is one {kind} device")
    sys.exit()
path = quickstart_model(seed=0)
lengths = torch.tensor([12, 3, 7, 9])
total, generator = int(lengths.sum()), torch.Generator().manual_seed(0)
batch = {
    "input_ids": torch.randint(21, (total,), generator=generator),
    "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
    "loss_mask": torch.cat([torch.arange(length) for length in lengths]) >= 2,
    "old_logprobs": torch.full((total,), -3.0),
    "advantages": torch.randn(len(lengths), generator=generator),
}


def trainer(*devices):
    with rlcore.meta_device():
        engine = rlcore.TrainEngine(policy_class(path).from_pretrained(path))
    engine.build(devices=list(devices), data_parallel_size=len(devices), timeout_s=300)
    return engine


def losses(engine):
    return [engine.train_batch(batch, ppo_clip(), max_grad_norm=0.5)["loss"] for _ in range(STEPS)]


def sync(engine, target, route):
    engine.train_batch(batch, ppo_clip())
    told, is_right = f"sync {route} from {engine.devices} to {target.devices}", False
    try:
        report = engine.sync_weights(target, route=route, checksums="always", verify=True)
        told, is_right = f"{told}: every byte is right; {report}", True
    except UnsupportedError as error:
        told, is_right = f"{told}: refused: {error.reason}", True
    except RlcoreError as error:
        told = f"{told}: FAILED: {error}"
    print(told, flush=True)
    return is_right


with trainer("cpu") as one:
    right = losses(one)
with rlcore.InferenceEngine(path) as target:
    target.build(devices=[f"{kind}:1"], launcher="process", dtype="float32", timeout_s=300)
    with trainer(f"{kind}:0", f"{kind}:1") as two:
        found = losses(two)
        are_right = max(abs(a - b) / abs(b) for a, b in zip(found, right)) <= BOUND
        print(f"FSDP2 on two ranks: losses {found}; on the CPU {right}; "
              f"{'all' if are_right else 'FAILED: not all'} within {BOUND:.0e}", flush=True)
        done = [are_right, sync(two, target, "packed")]
    with trainer(f"{kind}:1") as beside:  # some devices open only memory of their own
        done.append(sync(beside, target, "direct"))
    with trainer(f"{kind}:0") as apart:
        done.append(sync(apart, target, "collective"))
sys.exit(not all(done))
PYTHON
}

record npu-smi bounded npu-smi info
record packages bounded "$python" -m pip list --format freeze
record doctor bounded "$python" -m rlcore doctor --json
record devices bounded "$python" -m rlcore devices "$device" --json
record conformance bounded "$python" -m pytest -q -p no:cacheprovider --pyargs rlcore.conformance --device "$device" \
    --conformance-json "$folder/conformance.json"
record operators operators
record pair pair
record quickstart bounded "$python" -m rlcore quickstart --device "$device" --steps "${STEPS:-20}" \
    ${MODEL:+--model "$MODEL"} --output "$folder/quickstart"
record bench bounded "$python" -m rlcore bench run ${CASES:-$cases} --quick --device "$device" -o "$folder/bench.json"
pack
