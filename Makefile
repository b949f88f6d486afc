# miStudio. `make demo` shows it at work, `make test` proves it, `make run` serves.
#
#   PORT=8001            the web server's port
#   MISTUDIO_HOME=dir    the data folder (default ./var)
#   EXIT=1               `make demo` ends after the result
#   PYTHON=python3.12    the Python that the environment is made from (3.11 to 3.13)
#
# Paths stay relative and scripts are called through Python: the folder's name may contain a space.

PYTHON ?= python3
PY := .venv/bin/python
ifneq ($(strip $(MISTUDIO_HOME)),)
export MISTUDIO_HOME
endif
port = $(if $(PORT),--port $(PORT))

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo run test test-all check format oracle clean

help:
	@echo "make demo      set up, train a sparse autoencoder on a small language model, show it in the browser"
	@echo "make demo EXIT=1   the same, ending after the result"
	@echo "make run       set up and serve"
	@echo "make test      set up and run the tests; test-all adds the slow ones"
	@echo "make check     style, types, import rules, Django's own checks; make format repairs style"
	@echo "make oracle    compare results with other libraries (about 2 GB more)"
	@echo "make setup     only the set-up;  make clean removes caches"

setup:
	@$(PYTHON) scripts/setup.py

setup-dev:
	@$(PYTHON) scripts/setup.py --dev

demo: setup
	$(PY) manage.py demo $(port) $(if $(EXIT),--exit)

run: setup
	$(PY) manage.py up $(port)

test: setup-dev
	$(PY) -m pytest -m "not slow and not gpu"

test-all: setup-dev
	$(PY) -m pytest

check: setup-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) .venv/bin/lint-imports
	$(PY) manage.py check
	$(PY) manage.py makemigrations --check --dry-run

format: setup-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

oracle:
	@$(PYTHON) scripts/setup.py --dev --oracle
	$(PY) -m pytest -m oracle

# Not the environment, and never the data: remove .venv or var by hand if you mean to.
clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
