#!/usr/bin/env bash
# For the first person with an NPU: everything that rlcore can say of it, in one file to send back.
set -u
folder="rlcore-npu-$(date -u +%Y%m%dT%H%M%SZ)"
mkdir "$folder"

record() {  # name, command...
    local name=$1
    shift
    echo "== $name"
    "$@" > "$folder/$name.txt" 2>&1
    echo "exit code $?" >> "$folder/$name.txt"
}

for name in npu-smi doctor devices conformance quickstart bench; do
    case "$name" in
        npu-smi) record "$name" npu-smi info ;;
        doctor) record "$name" rlcore doctor --json ;;
        devices) record "$name" rlcore devices npu --json ;;
        conformance) record "$name" python -m pytest -q --pyargs rlcore.conformance --device npu \
            --conformance-json "$folder/conformance.json" ;;
        quickstart) record "$name" rlcore quickstart --device npu --steps 20 --output "$folder/quickstart" ;;
        bench) record "$name" rlcore bench run --quick --device npu -o "$folder/bench.json" ;;
    esac
done

tar -czf "$folder.tar.gz" "$folder"
echo "Please attach $folder.tar.gz to an issue."
