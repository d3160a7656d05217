# `make` or `make help` says what there is.

PYTHON  ?= python3
VENV    ?= .venv
RECIPE  ?= recipes/quickstart.toml
ARGS    ?=
# URL of a package index with other torch builds, the CPU ones say (see constraints.txt).
TORCH_INDEX ?=

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PYTEST  := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help train test check format docs clean

help: ## This text
	@echo "usage: make TARGET [PYTHON=python3.12] [RECIPE=recipes/sync.toml] [ARGS='--set steps=5']"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

train: $(VENV)/.installed-train ## Install what is needed (once), then train RECIPE: a first result in minutes
	@$(BIN)/headrace train $(RECIPE) $(ARGS)

test: $(VENV)/.installed-dev ## Everything that runs on a CPU; fetches the default model once
	@$(PYTEST)

check: $(VENV)/.installed-dev ## Format, lint, types, layers and the fast tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(PYTEST) -m "not slow and not model"

format: $(VENV)/.installed-dev ## Format and fix what can be fixed by machine
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-dev ## Write the generated pages (config, plan-spec and planner-constants in docs/)
	@$(BIN)/python -m headrace.config.document docs

clean: ## Remove caches and build products; runs/ and the virtual environment stay
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make every later call instant: pip runs again only when the dependencies have changed.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# The build backend is pinned too, so it is installed here and pip builds without a network of its own.
$(VENV)/.installed-train: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (the first time takes a few minutes)"
	@$(INSTALL) hatchling editables
	@$(INSTALL) --no-build-isolation -e '.[train,envs]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-train
	@echo "installing the development tools into $(VENV)"
	@$(INSTALL) --no-build-isolation -e '.[train,envs,dev]'
	@touch $@
