# For people who work on Triaxis. `make setup` makes .venv with what the tests need; `make check` is the loop before a commit
# (under 3 minutes on 2 cores).
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
export OMP_NUM_THREADS ?= 1
export PYTHONPATH := $(CURDIR)

.PHONY: setup check lint types contracts fast format

setup:
	bash launch/bootstrap.sh dev

check: lint types contracts fast

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -c "from clang_format import clang_format; clang_format()" --dry-run -Werror tests/cuda_stub/c/*.[ch]

types:
	$(PYTHON) -m mypy

contracts:
	$(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

fast:
	$(PYTHON) -m pytest -q -n logical --maxprocesses 8 --dist loadfile -m "not slow and not gpu and not distributed"

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(PYTHON) -c "from clang_format import clang_format; clang_format()" -i tests/cuda_stub/c/*.[ch]
