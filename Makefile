# Needs Python 3.11 or newer and a package index; every target makes .venv by itself where it is missing.
#   make quickstart   ends with a trained adapter
#   make test         ends with the tests passed
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On Linux mlx needs a backend of its own: cpu, cuda12 or cuda13.
BACKEND ?= $(if $(filter Darwin,$(shell uname -s)),,cpu)
comma := ,
EXTRAS := dev$(if $(BACKEND),$(comma)$(BACKEND))
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

LOCK := requirements-dev.lock

.PHONY: setup test doctor nightly optional lint build lock quickstart clean

setup: $(STAMP)

$(STAMP): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r $(LOCK)
	$(BIN)/python -m pip install --quiet -e ".[$(EXTRAS)]"
	@touch $@

test: setup
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

# Is what segtrain relies on right on this machine?
doctor: setup
	$(BIN)/segtrain doctor

nightly: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile nightly

# Needs torch, which is large, and for the screenshot a Chromium on the path.
optional: setup
	$(BIN)/python -m pip install --quiet -e ".[dev-optional]"
	$(BIN)/python -m pytest tests/test_peft.py tests/test_report.py tests/test_notebook.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

build: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m pip install --quiet -e ".[release]"
	$(BIN)/python -m twine check --strict dist/*

# The newest releases that pyproject.toml allows, for every Python and system at once.
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet uv
	$(VENV)-lock/bin/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 --extra dev \
		--generate-hashes --no-emit-index-url --custom-compile-command "make lock" --output-file $(LOCK)

quickstart: setup
	$(BIN)/segtrain sft configs/demo.yaml --overwrite
	@echo "The adapter is in runs/demo. To use the commands as they stand above and in README.md:"
	@echo "  source $(BIN)/activate"

clean:
	rm -rf $(VENV) $(VENV)-lock dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
