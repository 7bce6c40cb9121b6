#!/usr/bin/env bash
# Packs wheels for a GPU machine without a network, which has Python 3.12 and torch 2.11 for CUDA 13.
#
#     bash tests/evidence/wheels/pack.sh FOLDER vllm tests       # sets are the text files beside this one
#
# makes FOLDER/vllm.tar.00, 01 ... of at most 52 MiB each. install.sh makes an environment of them there.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?usage: pack.sh FOLDER SET...}
shift
mkdir -p "$folder"
platforms=(--platform manylinux1_x86_64 --platform manylinux2014_x86_64 --platform any)
for minor in 5 12 17 24 26 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done

for set in "$@"; do
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    python3 -m pip download -q --no-deps --only-binary=:all: --implementation cp \
        --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" -d "$work" -r "$here/$set.txt"
    # 15 MB of 383 are left of SGLang's kernels, which it can be imported with; FlashAttention 3 is gone.
    for wheel in "$work"/sglang_kernel-*.whl; do
        test ! -e "$wheel" || zip -q -d "$wheel" '*flash_ops*' '*flashmla_ops*' '*infllm_ops*' '*sm100*'
    done
    if test "$set" = tests; then  # DeepSpeed has no wheel; of pure Python it serves every version
        DS_BUILD_OPS=0 DS_ACCELERATOR=cpu python3 -m pip wheel -q --no-deps -w "$work" deepspeed==0.19.8
    fi
    rm -f "$folder/$set".tar.*
    tar -C "$work" -cf - . | split -b 52M -d - "$folder/$set.tar."
    rm -rf "$work"
done
ls -l "$folder"
