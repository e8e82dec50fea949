# Tasks of a maintainer. They need Python 3.11 or later. The first one installs into .venv; later ones install again only
# when pyproject.toml or constraints.txt has changed.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
JOBS   ?= auto
ARGS   ?=
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo wheel test test-long test-torch fuzz operators golden lint format bench bench-gpu docs clean
.DELETE_ON_ERROR:

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "fpipe needs Python 3.11 or later; name one: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment (on Debian: python3-venv)"; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing fpipe into $(VENV); torch is large, so this takes a minute or more ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing fpipe and its tools into $(VENV) ..."
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the tools of the docs into $(VENV) ..."
	@$(PIP) -e '.[docs,pictures]'
	@touch $@

demo: $(VENV)/.installed ## train a small GPT through 4 processes, and check its gradients; ARGS="--steps 50"
	@$(BIN)/fpipe train --schedule ZBV --ranks 4 --steps 200 --out run $(ARGS)
	@echo "next       $(BIN)/fpipe compare --ranks 4"

wheel: | $(VENV)/bin/python ## build dist/fpipe-*.whl, for `pip install dist/fpipe-*.whl` elsewhere
	@rm -f dist/fpipe-*.whl
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/fpipe-*.whl

# interpreters and workers that tests start read what is compiled, also where a machine sets this
test test-long test-torch docs: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.installed-dev ## the suite, without code of docs and examples; ARGS="-k name" for a part, JOBS=1 for one process
	@$(BIN)/python -m pytest -n $(JOBS) $(or $(ARGS),-m "not docs")

test-long: $(VENV)/.installed-dev ## the suite with all cases of its tables, docs and examples
	@$(BIN)/python -m pytest -n $(JOBS) --long $(ARGS)

TORCH ?= 2.15.0
OTHER := .venv-torch-$(TORCH)

$(OTHER)/.installed: | $(VENV)/.installed-dev
	@test -x $(OTHER)/bin/python || $(VENV)/bin/python -m venv $(OTHER)
	@echo "installing torch $(TORCH) into $(OTHER) (several GB) ..."
	@grep -vE '^(torch|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	@$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt \
		torch==$(TORCH) -e '.[test]'
	@touch $@

test-torch: $(OTHER)/.installed ## the whole suite with another torch, in an environment of its own; TORCH=2.11.0
	@$(OTHER)/bin/python -m pytest -n $(JOBS) $(ARGS)

fuzz: $(VENV)/.installed-dev ## random pipelines against plain autograd; ARGS="--minutes 10", ARGS="--case 7"
	@$(BIN)/python -m tests.fuzz $(ARGS)

operators: $(VENV)/.installed-dev ## every differentiable operator of torch as a stage, with both engines
	@$(BIN)/python -m tests.fuzz.operators $(ARGS)

golden: $(VENV)/.installed-dev ## rewrite golden files and the output shown in the docs; then review git diff
	@$(BIN)/python -m pytest -n $(JOBS) --update-golden tests/whole/test_golden.py tests/whole/test_docs.py $(ARGS)

lint: $(VENV)/.installed-dev ## ruff and pyright
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright

format: $(VENV)/.installed-dev ## format the code and apply fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# with TORCH=2.15.0 in the command, the benchmarks run in that environment
BENCH_ENV := $(if $(filter command line,$(origin TORCH)),$(OTHER),$(VENV))

.venv-peers/.installed: | $(VENV)/.installed-dev
	@test -x .venv-peers/bin/python || $(VENV)/bin/python -m venv .venv-peers
	@echo "installing the peers into .venv-peers ..."
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e . wheel ninja \
		setuptools scipy opt_einsum ml_dtypes
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps jax==0.10.2 jaxlib==0.10.2 \
		torchgpipe==0.0.7 megatron-core==0.16.1
	@DS_BUILD_OPS=0 .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		deepspeed==0.19.8
	@touch $@

bench: $(if $(filter peers,$(ARGS)),.venv-peers/.installed)
bench: $(if $(filter $(VENV),$(BENCH_ENV)),$(VENV)/.installed-dev,$(OTHER)/.installed) ## all benchmarks of a CPU, into docs/performance.md; ARGS="torch limit" for some, ARGS=peers, TORCH=2.15.0
	@$(BENCH_ENV)/bin/python -m benchmarks $(ARGS)

bench-gpu: $(VENV)/.installed-dev ## benchmarks of one GPU, if there is one
	@$(BIN)/python -m benchmarks gpu $(ARGS)

docs: $(VENV)/.installed-docs $(VENV)/.installed-dev ## run all code of docs and examples, and build the docs into site/
	@$(BIN)/python -m pytest -n $(JOBS) -m docs $(ARGS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "the docs are in site/: open site/index.html, no network is needed"

clean: ## remove build products and caches, keep .venv
	@rm -rf build dist site .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
