# make train    train a language model by RL; sets up everything itself        (ARGS="--steps 5")
# make test     set up and test
# make help     the rest
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV    ?= .venv
PYTHON  ?= # any Python >= 3.11; found by itself when empty
ARGS    ?=
WORKERS ?= 2 # test processes
override VENV := $(strip $(VENV))
override WORKERS := $(strip $(WORKERS))
PY = $(VENV)/bin/python

# What XLA compiled is kept in the folder, so that the next start is quicker.
TRAIN_ENV = JAX_COMPILATION_CACHE_DIR="$${JAX_COMPILATION_CACHE_DIR:-$(CURDIR)/.cache/xla}"

.PHONY: help train quick compare sample setup setup-dev test test-core test-all lint format pins clean

help:
	@echo "make train     train SmolLM2-135M by RL on this machine     (ARGS=\"--help\" lists the flags)"
	@echo "make quick     a small model from scratch learns to sort, about two minutes, no download"
	@echo "make compare   all methods on the same small task, with a table and curves   (half an hour)"
	@echo "make sample    text from the latest run                     (ARGS=\"--help\")"
	@echo "make test      the test suite          make test-all   with the slow ones"
	@echo "make lint      ruff and pyright        make format     apply ruff's format and fixes"
	@echo "make setup     only the environment    make pins       pin the dependencies anew (needs uv)"
	@echo "make clean     remove the environment and the caches, keep the runs"
	@echo "Variables: PYTHON=python3.12  VENV=.venv  WORKERS=2  ACCELERATOR=cuda13|cuda12|tpu"

train: setup
	$(TRAIN_ENV) $(PY) experiments/grpo.py $(ARGS)

quick: setup
	$(TRAIN_ENV) $(PY) experiments/grpo.py --task sort $(ARGS)

compare: setup
	$(TRAIN_ENV) $(PY) experiments/compare.py $(ARGS)

sample: setup
	$(TRAIN_ENV) $(PY) experiments/sample.py $(ARGS)

# The stamps are the last thing that the set-up writes: one that was broken off is done again.
setup: $(VENV)/.ready-experiments $(if $(ACCELERATOR),$(VENV)/.ready-on-$(strip $(ACCELERATOR)))
setup-dev: $(VENV)/.ready-dev

$(VENV)/.ready-on-%: $(VENV)/.ready-experiments
	@bash requirements/install.sh "$(VENV)" experiments "" "$*"
	@touch $@

$(VENV)/.ready-%: pyproject.toml requirements/%.txt requirements/install.sh $(if $(strip $(PYTHON)),FORCE)
	@bash requirements/install.sh "$(VENV)" "$*" "$(strip $(PYTHON))"

FORCE:

test: setup-dev
	$(PY) -m pytest -m "not slow" -n $(WORKERS) --dist loadfile $(ARGS)

# Without what takes more than a few seconds each: for a second version of Python and JAX.
test-core: setup-dev
	$(PY) -m pytest -m "not slow and not long" -n $(WORKERS) --dist loadfile $(ARGS)

test-all: setup-dev
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: setup-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

format: setup-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

pins:
	requirements/compile.sh

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
