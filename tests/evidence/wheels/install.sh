#!/usr/bin/env bash
# Makes an environment of what pack.sh packed, on a machine without a network: a copy of the virtual environment that
# python3 is of, with hard links, these wheels, and rlcore from this checkout.
#
#     bash tests/evidence/wheels/install.sh FOLDER /envs/vllm vllm tests
set -euo pipefail
folder=$(cd "${1:?usage: install.sh FOLDER ENVIRONMENT SET...}" && pwd)
environment=${2:?usage: install.sh FOLDER ENVIRONMENT SET...}
shift 2
base=$(python3 -c 'import sys; sys.exit("python3 is of no virtual environment") if sys.prefix == sys.base_prefix else print(sys.prefix)')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$(dirname "$environment")"
cp -al "$base" "$environment"
for set in "$@"; do
    mkdir -p "$work/$set"  # two sets may have two versions of a package: the later one's is installed over it
    cat "$folder/$set".tar.* | tar x -C "$work/$set"
    "$environment/bin/python" -m pip install -q --no-index --no-deps --no-compile --force-reinstall "$work/$set"/*.whl
done
cd "$(dirname "$0")/../../.."
"$environment/bin/python" -m pip install -q --no-index --no-deps --no-build-isolation -e .
# Worker after worker imports them, and takes minutes where nothing is compiled.
"$environment/bin/python" -m compileall -qq -j 0 -x '/tests/|/torch/testing/' "$environment/lib" > /dev/null || true
"$environment/bin/python" -c 'import rlcore; print(rlcore.__file__)'
