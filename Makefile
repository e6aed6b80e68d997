# Every target sets up what it needs in .venv and then runs; nothing else has to be installed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-levels test-lowest test-slow coverage lint bench clean

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/ready ## generate for a dozen prompts, show where the time went, write a Perfetto trace
	$(BIN)/python examples/demo.py

test: .venv/ready ## everything but the slow tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile $(PYTEST_ARGS)
	$(BIN)/python -m tests.levels

test-levels: .venv/ready ## the part of it that runs again with the processor's best features hidden
	$(BIN)/python -m tests.levels $(PYTEST_ARGS)

test-lowest: .venv-lowest/ready ## everything but the slow tests, with the lowest versions allowed
	.venv-lowest/bin/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile $(PYTEST_ARGS)

test-slow: .venv/ready ## the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

coverage: .venv/ready ## lines that the unit and property tests run, by file; reported, not gated
	$(BIN)/python -m pytest -q -m "not slow and not gpu" -n 2 --dist loadfile --cov --cov-report=term:skip-covered tests/unit tests/property $(PYTEST_ARGS)

lint: .venv/ready ## check and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

bench: .venv/ready ## offline figures on the embedded model
	$(BIN)/python benchmarks/offline.py

.venv/ready: pyproject.toml constraints.txt scripts/setup.sh scripts/install_services.sh
	sh scripts/install_services.sh
	PYTHON=$(PYTHON) sh scripts/setup.sh
	touch $@

.venv-lowest/ready: pyproject.toml constraints.txt scripts/setup.sh scripts/lowest_versions.py
	PYTHON=$(PYTHON) VENV=.venv-lowest sh scripts/setup.sh
	touch $@

clean: ## remove the environments and recorded runs
	rm -rf .venv .venv-lowest runs
