#!/usr/bin/env bash
# For the first person with an NPU: everything that rlcore can say of it, in one file to send back.
#
#     bash docs/first_npu_run.sh                  all steps; Ctrl-C packs what is done so far
#     bash docs/first_npu_run.sh doctor bench     some of them
#
# DEVICE (npu; DEVICE=cpu tries the script itself), PYTHON (python), STEPS of the quickstart (20), MODEL of the
# quickstart (its own), CASES of the benchmark (all of --quick), LIMIT in seconds of each step (3600).
# What fails, hangs or is not there is recorded, and the next step goes on. Of the environment only a fixed list of
# variables is recorded (rlcore/doctor/secrets.py), and what else repeats a secret is taken out before packing.
set -u
all="npu-smi packages doctor devices conformance operators quickstart bench"
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

operators() {  # every implementation of every operator, against its definition, on the device
    bounded "$python" - "$device" <<'PYTHON'
import sys

import torch

import rlcore
from rlcore.errors import UnsupportedError
from rlcore.ops import linear_logprob, token_logprob
from rlcore.packed.choice import AttentionCall, implementations, why_not
from rlcore.registry import registry

device = rlcore.get_device(sys.argv[1])
where = device.torch_device
torch.manual_seed(0)
hidden, weight = torch.randn(300, 256), torch.randn(5003, 256) / 16
targets = torch.randint(5003, (300,))
has_failed = False
for dtype in (torch.float32, torch.bfloat16):
    calls = {
        "token_logprob": (token_logprob, [(hidden @ weight.T).to(where, dtype)]),
        "linear_logprob": (linear_logprob, [hidden.to(where, dtype), weight.to(where, dtype)]),
    }
    for name, (operator, tensors) in calls.items():
        for entry in registry().ops[name]:
            try:
                leaves = [x.clone().requires_grad_() for x in tensors]
                found = operator(*leaves, targets.to(where), with_entropy=True, implementation=entry.name)
                (found.logprob.sum() + found.entropy.sum()).backward()
                wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
                right = operator(*wide, targets, with_entropy=True, implementation="reference")
                (right.logprob.sum() + right.entropy.sum()).backward()
                pairs = [(found.logprob, right.logprob), (found.entropy, right.entropy)]
                pairs += [(a.grad, b.grad) for a, b in zip(leaves, wide)]
                errors = [float((a.detach().cpu().double() - b).norm() / b.norm()) for a, b in pairs]
                told = "relative errors " + " ".join(f"{error:.1e}" for error in errors)
            except UnsupportedError as error:
                told = f"refused: {error.reason}"
            except Exception as error:
                has_failed = True
                told = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"{name} {entry.name} {dtype}: {told}", flush=True)
    for name in implementations(where.type):
        for window in (None, 64):
            reason = why_not(name, AttentionCall(8, 2, 128, 128, window=window), where, dtype)
            print(f"packed_attention {name} window={window} {dtype}: {reason or 'right'}", flush=True)
sys.exit(has_failed)
PYTHON
}

record npu-smi bounded npu-smi info
record packages bounded "$python" -m pip list --format freeze
record doctor bounded "$python" -m rlcore doctor --json
record devices bounded "$python" -m rlcore devices "$device" --json
record conformance bounded "$python" -m pytest -q -p no:cacheprovider --pyargs rlcore.conformance --device "$device" \
    --conformance-json "$folder/conformance.json"
record operators operators
record quickstart bounded "$python" -m rlcore quickstart --device "$device" --steps "${STEPS:-20}" \
    ${MODEL:+--model "$MODEL"} --output "$folder/quickstart"
record bench bounded "$python" -m rlcore bench run ${CASES:-} --quick --device "$device" -o "$folder/bench.json"
pack
