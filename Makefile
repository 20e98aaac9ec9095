# `make parity` proves the embedded tiny checkpoint; `make test` runs the tests.
# Either does everything, set-up included; PYTHON=python3.13 uses another Python.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

# A shim of pyenv may lead nowhere: then its versions are searched for the name.
INTERPRETER := $(shell $(PYTHON) -c 'import sys; print(sys.executable)' 2>/dev/null || \
  ls -d "$$(pyenv root 2>/dev/null)"/versions/*/bin/$(PYTHON) 2>/dev/null | sort -V | tail -n 1)
VERSION := $(if $(INTERPRETER),$(shell $(INTERPRETER) -c \
  'import platform; print(platform.python_version())'))

# One environment per Python: .venv for the default, .venv-3.13 for PYTHON=python3.13.
ifeq ($(PYTHON),python3)
VENV ?= .venv
else
VENV ?= .venv-$(basename $(VERSION))
endif
BIN := $(VENV)/bin
# A stamp names the exact interpreter: another one makes the environment anew.
TEST := $(VENV)/.installed-test-$(VERSION)
DEV := $(VENV)/.installed-dev-$(VERSION)

PACKAGES := shared zoo_linen zoo_nnx parity
TINY := shared/data/qwen3_next_tiny
PARITY_CHECK := check $(TINY) --expect=$(TINY)/golden.npz

export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.0

.PHONY: help parity test doctest lint format types imports interpreter clean
.DEFAULT_GOAL := help

help:
	@echo 'make parity   check both frontends on the embedded tiny checkpoint'
	@echo 'make test     run the tests (ARGS="-k rope -x" to choose)'
	@echo 'make doctest  run the examples in docstrings and README'
	@echo 'make lint     ruff (make format rewrites);  make types  mypy'
	@echo 'make imports  import contracts;             make clean  remove what was made'

parity: $(TEST)
	$(BIN)/parity $(PARITY_CHECK) $(ARGS)

# worksteal keeps neighbouring tests, which share compiled functions, together, and
# still evens out the end of the run.
test: $(TEST)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=15 $(ARGS)

doctest: $(TEST)
	$(BIN)/pytest -n $(WORKERS) --doctest-modules --doctest-glob=README.md $(ARGS) $(PACKAGES) README.md

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV)
	$(BIN)/mypy

imports: $(DEV)
	$(BIN)/lint-imports

# For .ci/run: what PYTHON comes to.
interpreter:
	@echo '$(INTERPRETER)'

clean:
	rm -rf .venv .venv-* .cache .hypothesis .import_linter_cache build dist *.egg-info
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(TEST): setup.cfg pyproject.toml
	@$(or $(INTERPRETER),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'parity-zoo needs Python >= 3.11; $(PYTHON) is $(or $(VERSION),not there).' \
	         'Name another: PYTHON=python3.12 make $(MAKECMDGOALS)'; exit 1; }
	@echo 'Installing into $(VENV) (Python $(VERSION)) ...'
	@test -e $@ || $(INTERPRETER) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

$(DEV): $(TEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,dev]'
	@touch $@
