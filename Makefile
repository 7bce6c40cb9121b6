# Everything runs in .venv, which the first target makes. Another interpreter: make test PYTHON=python3.13
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
NO_GPU := not gpu and not multigpu and not vllm and not sglang
SGLANG_PYTEST := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 .venv/sglang/bin/python -m pytest
SGLANG_MARKED := -m "sglang and not gpu" --never-skip sglang
OFTEN := $(NO_GPU) and not npu_sim and not slow and not ray

# What pip would compile with one process and in twice the time: files that nothing imports, or a few of many.
LATER := /tests/|/torch/testing/|/transformers/models/|/mypy/

# Programs of tests begin by the hundred, and would compile rlcore each time.
unexport PYTHONDONTWRITEBYTECODE

# .venv names this folder, and Python before 3.13 reads that in the locale's encoding: C has no letter beyond ASCII.
ifneq ($(shell pwd | LC_ALL=C tr -d '\n -~'),)
export LC_ALL := C.UTF-8
endif

.PHONY: quickstart test test-all test-slow ray-test sglang-test sglang-engine sglang-others check gpu-test bench bench-micro results docs same-python

quickstart: .venv/quickstart.installed  ## Train a small language model by reinforcement learning
	@$(BIN)/rlcore quickstart

test: .venv/dev.installed  ## What to run after each change; minutes, installation included
	@$(PYTEST) -m "$(OFTEN)" --every-module $(PYTEST_FLAGS)

test-all: test test-slow  ## And what takes long and needs no GPU

test-slow: .venv/dev.installed .venv/docs.installed .venv/trl.installed .venv/ray.installed .venv/pyright.installed .venv/deepspeed/installed  ## What `make test` leaves out
	@$(PYTEST) -m "$(NO_GPU) and (npu_sim or slow)" $(PYTEST_FLAGS)

ray-test: .venv/dev.installed .venv/ray.installed  ## All tests of launcher="ray", some minutes; with hosts of namespaces as root
	@$(PYTEST) -m "$(NO_GPU) and ray" $(PYTEST_FLAGS)

sglang-test: .venv/sglang/installed  ## All tests of the executor sglang with real SGLang on the CPU, some minutes
	@echo "Two halves of the tests run beside each other; each prints when it has ended"
	@$(MAKE) --no-print-directory --output-sync=target --jobs=2 sglang-engine sglang-others

sglang-engine: .venv/sglang/installed
	@$(SGLANG_PYTEST) $(SGLANG_MARKED) tests/engines/sampling/sglang $(PYTEST_FLAGS)

sglang-others: .venv/sglang/installed
	@$(SGLANG_PYTEST) -q --pyargs rlcore.conformance --inference-executor sglang --device cpu --build-options '{"dtype": "float32"}'
	@$(SGLANG_PYTEST) $(SGLANG_MARKED) tests/quickstart tests/compat/test_rlite.py tests/bench/test_weight_sync_sglang_cases.py $(PYTEST_FLAGS)

check: .venv/dev.installed  ## Lint, format, types
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

gpu-test: .venv/dev.installed  ## The tests that need a GPU; fails where there is none
	@$(BIN)/python -c "import rlcore; rlcore.get_device('cuda')"
	@$(BIN)/python -m pytest -m "gpu or multigpu or vllm"

bench: .venv/dev.installed  ## Every benchmark case on the default device; the last line says where the record is
	@$(BIN)/rlcore bench run

bench-micro: .venv/dev.installed  ## The micro-benchmarks; compare two such files: rlcore bench compare A.json B.json
	@$(BIN)/python -m pytest -q -p rlcore.bench.pytest_plugin --benchmark-only --benchmark-json=bench-micro.json tests/benchmarks

results: .venv/dev.installed  ## README's table, docs/results.md, docs/report.html, the schema, and the table of docs/devices.md, from bench/results
	@$(BIN)/python -m rlcore.bench.publish README.md
	@$(BIN)/python -m rlcore.conformance.table bench/results/conformance/*.json --into docs/devices.md

docs: .venv/docs.installed results  ## The documentation site, in outputs/docs; a warning fails
	@$(BIN)/python -m sphinx -q -W --keep-going docs outputs/docs
	@echo "outputs/docs/index.html"

# Stamps: the second run is instant; a changed pyproject.toml or constraints.txt installs again.
.venv/%.installed: pyproject.toml constraints.txt | same-python
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"rlcore needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}; use make PYTHON=..." if v < (3, 11) else 0)'
	@test -x $(BIN)/python || { echo "Making .venv"; $(PYTHON) -m venv .venv && touch .venv/new; }
	@echo "Asking pip's index for torch"
	@$(PIP) install --quiet --dry-run --no-deps --only-binary :all: -c constraints.txt torch \
		|| { echo "pip finds no $$(grep ^torch= constraints.txt) for $$($(BIN)/python --version) on this machine: use make PYTHON=..." >&2; \
			test ! -e .venv/new || rm -r .venv; exit 1; }
	@rm -f .venv/new
	@echo "Installing rlcore[$*] into .venv; the first time takes minutes, most of them for torch"
	@$(PIP) install --no-compile -c constraints.txt -e '.[$*]'
	@echo "Compiling what was installed"
	@$(BIN)/python -m compileall -qq -j 0 -x '$(LATER)' .venv/lib >/dev/null || true
	@touch $@

# A type checker for tests alone, with a node of PyPI's: nothing is downloaded when it runs.
.venv/pyright.installed: constraints.txt .venv/dev.installed
	@echo "Installing pyright into .venv"
	@$(PIP) install --quiet -c constraints.txt 'pyright[nodejs]'
	@touch $@

# An environment of its own: SGLang pins a torch and a transformers. Its requirements are those of a machine with CUDA.
.venv/sglang/installed: tests/engines/sampling/sglang/requirements.txt pyproject.toml | same-python .venv/dev.installed
	@echo "Installing SGLang into .venv/sglang"
	@$(PYTHON) -m venv .venv/sglang
	@.venv/sglang/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@.venv/sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.21
	@.venv/sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@cp tests/engines/sampling/sglang/stand_in/* .venv/sglang/lib/python3*/site-packages/
	@touch $@

# In a folder of its own, which its tests alone put on the path: transformers and others import it wherever they find it.
.venv/deepspeed/installed: constraints.txt .venv/dev.installed
	@echo "Building DeepSpeed in .venv/deepspeed"
	@$(PIP) install --quiet --target .venv/deepspeed -c constraints.txt einops hjson msgpack ninja psutil py-cpuinfo pydantic tqdm
	@DS_ACCELERATOR=cpu $(PIP) install --quiet --target .venv/deepspeed -c constraints.txt --no-build-isolation --no-deps deepspeed
	@touch $@

# An interpreter that was asked for runs, and is the one of .venv, or this says so.
same-python:
	@test -x $(BIN)/python -a "$(origin PYTHON)" = file || $(PYTHON) --version >/dev/null 2>&1 \
		|| { echo "$(PYTHON) does not run: install it, or use make PYTHON=..." >&2; exit 1; }
ifneq ($(origin PYTHON),file)
	@test ! -x $(BIN)/python || test "$$($(BIN)/python --version)" = "$$($(PYTHON) --version)" \
		|| { echo ".venv has $$($(BIN)/python --version), $(PYTHON) is $$($(PYTHON) --version): remove .venv first" >&2; exit 1; }
endif
