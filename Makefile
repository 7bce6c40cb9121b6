# Everything runs in .venv, which the first target makes. Another interpreter: make test PYTHON=python3.13
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test check gpu-test bench bench-micro results

quickstart: .venv/quickstart.installed  ## Train a small language model by reinforcement learning
	@$(BIN)/rlcore quickstart

test: .venv/dev.installed  ## The tests that need no GPU and no patience; .ci/run has the slow ones too
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile \
		-m "not gpu and not multigpu and not vllm and not npu_sim and not slow" $(PYTEST_FLAGS)

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

results: .venv/dev.installed  ## The schema and all tables of README.md and docs/, from the code and bench/results
	@$(BIN)/python -m rlcore.bench.readme README.md
	@$(BIN)/python -m rlcore.conformance.table bench/results/conformance/*.json --into docs/devices.md

# Stamps: the second run is instant; a changed pyproject.toml or constraints.txt installs again.
.venv/%.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"rlcore needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}; use make PYTHON=..." if v < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing rlcore[$*] into .venv; the first time takes a few minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@
