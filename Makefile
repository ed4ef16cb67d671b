# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Without the plugins of libraries under test: pytest would rewrite every module of theirs at each start. One thread for
# each process: two that share two cores wait for each other's threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --disable-plugin-autoload -p xdist -p hypothesispytest

.PHONY: demo test pytest collect test-gpu test-server lint format clean

demo: $(VENV)/.run
	$(BIN)/subten demo demo-moe

test: lint pytest

# Each process begins with one half of the tests, so that what a module compiles once for all of its tests is seldom
# made in both.
pytest: $(VENV)/.dev
	$(PYTEST) -n 2 --dist worksteal

# Imports what the tests import: its bytecode is there afterwards, for all processes.
collect: $(VENV)/.dev
	$(PYTEST) --collect-only -qq > /dev/null

test-gpu: $(VENV)/.dev
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu tests/gpu

# The page in a browser (needs Chromium: apt-get install chromium), lm_eval and Ray Serve against the server.
test-server: $(VENV)/.external
	$(PYTEST) -n 2 -m 'browser or external' tests/server

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("subten needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

# Each has all of the ones before with it: installed one after the other, all would be resolved and built.
$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $(VENV)/.run $@

$(VENV)/.external: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev,external]'
	touch $(VENV)/.run $(VENV)/.dev $@

clean:
	rm -rf $(VENV)
