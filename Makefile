# The project's everyday commands. Each prepares the virtual environment if it is not there yet.
#   make demo    the whole path on this machine: profile, search, simulate, train, compare
#   make test    lint, types, tests, notebooks
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: venv demo test lint types unit notebooks bench bench-headline clean

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[executor,notebooks,dev]'
	touch $(INSTALLED)

demo: venv
	$(BIN)/harmony demo -o demo-output

test: lint types unit notebooks

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

# Emulated GPUs keep real time: their tests run one after the other, with nothing of ours beside them.
unit: venv
	$(BIN)/python -m pytest -q -n 2 --ignore=tests/executor
	$(BIN)/python -m pytest -q tests/executor

notebooks: venv
	$(BIN)/python -m pytest -q --timeout 600 --nbmake notebooks

bench: venv
	for script in $(filter-out benchmarks/bench_headline.py benchmarks/bench_peers.py,$(wildcard benchmarks/bench_*.py)); do $(BIN)/python $$script || exit 1; done

# The paper's claims, asked of the measured profiles beside this checkout. Hours; it goes on where it was stopped.
bench-headline: venv
	$(BIN)/python benchmarks/bench_headline.py -o headline.csv

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info demo-output
