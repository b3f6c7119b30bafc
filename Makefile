# make run     set up a virtual environment, then train LaMer on Sokoban with a tiny model
# make test    set up, then run the core tests (make test-slow: those that take over 20 seconds each)
# make check   lint, formatting, import contracts, core tests: all that a reviewer would run
# make smoke   two updates of everything, in seconds
#
# ARGS goes to the command: make run ARGS="--config.seed=1", make test ARGS="tests/ops -x"

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup run smoke test test-slow lint check

help:
	@sed -n '/^# make/s/^# //p' Makefile

setup: $(STAMP)

# Installed again only when setup.py changes. A half-made environment leaves no stamp.
$(STAMP): setup.py
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (the first time takes a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	@touch $@

# Huge pages for malloc: the gradient of the tiny models is a quarter faster on Linux, the numbers are the same.
run: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
run: $(STAMP)
	$(BIN)/python experiments/run.py --config=experiments/lamer_sokoban.py --resume $(ARGS)

smoke: $(STAMP)
	@rm -rf runs/smoke
	$(BIN)/python experiments/run.py --config=experiments/lamer_sokoban.py:smoke --workdir=runs/smoke $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

check: lint test
