# `make demo` and `make test` do everything on a machine that has only Python 3.11: the environment is .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
# How many times as many cases as in `make test` properties are tried on.
EXAMPLES ?= 20
OUT ?= out
# Exact versions of everything, as constraints; empty for the newest that pyproject.toml allows.
LOCK ?= requirements/xla.txt
CORE_LOCK ?= requirements/core.txt

# One thread each: the tests run side by side, and float sums are the same on every machine.
export OMP_NUM_THREADS ?= 1
# Programs are compiled for devices that are not here; nothing may look for ones that are.
export JAX_PLATFORMS ?= cpu
export PJRT_DEVICE ?= CPU

.DEFAULT_GOAL := help
.PHONY: help install core demo docs graph picture examples notebooks golden tables lines check hypothesis test test-latest lock lint format clean

help: ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(STAMP) ## the environment, in .venv

# torch_xla brings files of an older torchax that belong to no package. So that tests can hold captures through torchax
# against those through torch_xla, the package is put over them afterwards, and without what it depends on.
$(STAMP): pyproject.toml $(LOCK) $(CORE_LOCK)
	@test -n "$(PYTHON)" || { echo "autoshard needs Python 3.11 or later: no python3 on the path" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "autoshard needs Python 3.11 or later, $(PYTHON) is older; pass PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade $(LOCK:%=--constraint %) uv setuptools
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(LOCK:%=--constraint %) \
		--no-build-isolation --editable '.[dev]'
	$(BIN)/uv pip install --quiet --compile-bytecode --no-deps --reinstall-package torchax --python $(BIN)/python \
		$(CORE_LOCK:%=--constraint %) torchax==0.0.13
	@touch $@

# Constraints, not a list to install: a build of torch for CPUs alone brings fewer packages than the lock names.
lock: $(STAMP) ## resolve requirements/*.txt anew, every package at its newest allowed version
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate --extra dev \
		pyproject.toml requirements/xla.in --output-file requirements/xla.txt
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate \
		--extra torchax --extra hf --extra test pyproject.toml requirements/core.in --output-file requirements/core.txt

demo: $(STAMP) ## plan GPT-2 for a TPU slice, hold it against hand-made plans, verify it, train under it
	$(BIN)/python examples/demo.py --out $(OUT)

examples: $(STAMP) ## every other script in examples/, as continuous integration does
	@set -e; for script in $(filter-out examples/demo.py,$(wildcard examples/*.py)); do \
		echo "== $$script"; $(BIN)/python $$script; done

notebooks: $(STAMP) ## run the notebooks at small size; `python notebooks/build.py` makes them anew at full size
	$(BIN)/python notebooks/build.py --check

docs: $(STAMP) ## the documentation as HTML, in $(OUT)/docs; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs $(OUT)/docs

tables: $(STAMP) ## the tables and figures of README.md and docs/, from the rows in benchmarks/results/
	$(BIN)/python benchmarks/tables.py

graph: $(STAMP) ## draw which package imports which, for the documentation
	$(BIN)/python docs/import_graph.py

picture: $(STAMP) ## plan README's example for GPUs and draw it, for README.md
	$(BIN)/python docs/plan_picture.py

lines: ## how many lines the package has, by folder
	@for folder in autoshard autoshard/*/ autoshard/cost/*/; do \
		printf '%6d  %s\n' "$$(find $$folder -name '*.py' -exec cat {} + | wc -l)" "$$folder"; done | grep -v __pycache__

check: lint ## before every commit: lint, and the tests that compile nothing, in five minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m 'not compiles and not slow'

hypothesis: $(STAMP) ## properties on new random cases
	AUTOSHARD_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n $(WORKERS) -m hypothesis

test: $(STAMP) ## all tests, the same cases every time
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

golden: $(STAMP) ## the golden plans anew, and what changed: tests/golden/*.json.gz
	$(BIN)/python -m tests.golden

test-latest: ## both test runs in environments of their own, with the newest of everything that is not pinned
	$(MAKE) VENV=.venv-latest LOCK= CORE_LOCK= test
	$(MAKE) CORE=.venv-core-latest LOCK= CORE_LOCK= CORE_TORCH=torch core

# A second environment: current torch, jax and torchax, without torch_xla. pip itself installs it: where a build of torch for
# CPUs alone is configured, pip takes that one.
CORE := .venv-core
CORE_TORCH ?= torch==2.13.0
CORE_STAMP := $(CORE)/.installed
CORE_TESTS ?= tests/core tests/test_sources.py tests/test_bad_input.py tests/test_mesh.py tests/graph \
	tests/stablehlo/test_reader.py tests/stablehlo/test_annotate.py tests/frontends/test_stablehlo_file.py \
	tests/cost/partitioner/test_propagate.py tests/cost/partitioner/test_tiling.py tests/cost/partitioner/passes \
	tests/planning/test_api.py tests/planning/test_hints.py tests/planning/test_search.py tests/planning/test_memory.py tests/plans/test_value.py \
	tests/lower/dtensor tests/lower/test_host_scalars.py tests/lower/test_to_jax.py tests/lower/test_tp_plan.py \
	tests/show/test_explanation.py tests/comparison/test_compared.py tests/cli/test_plan.py

$(CORE_STAMP): pyproject.toml $(CORE_LOCK)
	@test -n "$(PYTHON)" || { echo "autoshard needs Python 3.11 or later: no python3 on the path" >&2; exit 1; }
	test -x $(CORE)/bin/python || $(PYTHON) -m venv $(CORE)
	$(CORE)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(CORE_LOCK:%=--constraint %) \
		setuptools '$(CORE_TORCH)'
	$(CORE)/bin/python -m pip install --quiet --disable-pip-version-check $(CORE_LOCK:%=--constraint %) \
		--no-build-isolation --editable '.[torchax,hf,test]'
	@touch $@

core: $(CORE_STAMP) ## plan without torch_xla, on current torch, and run the tests that need no torch_xla
	$(CORE)/bin/autoshard plan hf:gpt2 --mesh 2x4 --train adamw --batch 8 --seq 128 --set n_layer=2
	$(CORE)/bin/python examples/without_torch_xla.py
	$(CORE)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(CORE_TESTS)

lint: $(STAMP) ## ruff, mypy, who may import whom, dead code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/vulture

format: $(STAMP) ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what was made, the environment too
	rm -rf $(VENV) $(CORE) .venv-latest .venv-core-latest $(OUT) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
