#!/usr/bin/env bash
# For the first person with an NPU: everything that rlcore can say of it, in one file to send back.
#
#     bash docs/first_npu_run.sh          DEVICE=cpu bash docs/first_npu_run.sh tries the script itself
set -u
device=${DEVICE:-npu}
steps=${STEPS:-20}
folder="rlcore-$device-$(date -u +%Y%m%dT%H%M%SZ)"
mkdir "$folder"

record() {  # name, command...
    local name=$1 code
    shift
    printf '== %s ' "$name"
    "$@" > "$folder/$name.txt" 2>&1
    code=$?
    echo "exit code $code" | tee -a "$folder/$name.txt"
}

operators() {  # every implementation of every operator, against its definition, on the device
    python - "$device" <<'PYTHON'
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
                told = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"{name} {entry.name} {dtype}: {told}", flush=True)
    for name in implementations(where.type):
        for window in (None, 64):
            reason = why_not(name, AttentionCall(8, 2, 128, 128, window=window), where, dtype)
            print(f"packed_attention {name} window={window} {dtype}: {reason or 'right'}", flush=True)
PYTHON
}

[ "$device" = npu ] && record npu-smi npu-smi info
record doctor rlcore doctor --json
record devices rlcore devices "$device" --json
record conformance python -m pytest -q --pyargs rlcore.conformance --device "$device" \
    --conformance-json "$folder/conformance.json"
record operators operators
record quickstart rlcore quickstart --device "$device" --steps "$steps" --output "$folder/quickstart"
record bench rlcore bench run --quick --device "$device" -o "$folder/bench.json"

rm -rf "$folder/quickstart/checkpoint" "$folder/quickstart/model"
tar -czf "$folder.tar.gz" "$folder"
echo "Please attach $folder.tar.gz to an issue."
