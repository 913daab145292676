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

.PHONY: setup test nightly lint build quickstart clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e ".[$(EXTRAS)]"
	@touch $@

test: setup
	$(BIN)/python -m pytest -m "not slow" -n 2

nightly: setup
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

build: setup
	$(BIN)/python -m pip install --quiet build
	rm -rf dist
	$(BIN)/python -m build --outdir dist

quickstart: setup
	@dir=$$(mktemp -d)/demo && \
	$(BIN)/segtrain sft configs/demo.yaml --set output.dir=$$dir && \
	echo "The adapter is in $$dir. Try it:" && \
	echo "  $(BIN)/mlx_lm.generate --model examples/demo-model --adapter-path $$dir --prompt 'Define teacher.'"

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
