# Every target sets up what it needs. PYTHON chooses the interpreter, VENV where the environment goes.
PYTHON ?= python3
VENV ?= .venv
PYTEST = $(VENV)/bin/python -m pytest
EXTRAS = huggingface,accelerate,trl,data,parquet,lightning,deepspeed,bench,docs,dev
NEWEST_TRITON = 3.9.0

PIP = $(VENV)/bin/python -m pip install -q --disable-pip-version-check
# pip would compile all of every package to bytecode, for more than a minute. What is imported is compiled then, and kept.
INSTALL = $(PIP) --no-compile -c .ci/constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test test-cpu test-all test-newest test-frameworks test-megatron test-torchtitan test-gpu test-multi-gpu lint docs figures format clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

RECIPE = PATH="$(abspath $(VENV))/bin:$$PATH" PYTHON="$(abspath $(VENV))/bin/python" launch/local.sh

train: $(VENV)/.ready  ## Train a small model on real text through the ring: all GPUs, or 2 CPU processes
	$(RECIPE)
	@echo "The first 20 steps again, on one process:"
	NPROC=1 $(RECIPE) --output_dir runs/quickstart-cp1 --trainer.max_steps 20 \
		--trainer.num_sanity_val_steps 0 --trainer.limit_val_batches 0
	PYTHONPATH=.:kernels $(VENV)/bin/python -m recipes.lightning.compare runs/quickstart-cp1 runs/quickstart

test: test-cpu  ## Run the tests that need no GPU

# Two tests at a time, of different files: much of a test is waiting for processes that start.
CPU_TESTS = OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
	$(PYTEST) tests -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
EVERY_CPU_TEST = not gpu and not multi_gpu and not frameworks
NEWEST_KERNELS = PYTHONPATH=$(abspath $(VENV))/triton-$(NEWEST_TRITON) $(PYTEST) tests/compile -m newest_triton
# One kernel for each path is compiled, and all if they, or their tests, differ from main's. Without git, all.
AS_IN_MAIN = git diff --quiet "$$(git merge-base HEAD origin/main || git merge-base HEAD main)" -- kernels tests/compile

test-cpu: $(VENV)/.ready $(VENV)/triton-$(NEWEST_TRITON)
	$(CPU_TESTS) -m "$(EVERY_CPU_TEST) and not nightly$$( ($(AS_IN_MAIN)) 2>/dev/null && echo ' and not every_kernel')"
	$(NEWEST_KERNELS)

test-all: $(VENV)/.ready $(VENV)/triton-$(NEWEST_TRITON)  ## Run the same, the nightly tests, and compile every kernel
	$(CPU_TESTS) -m "$(EVERY_CPU_TEST)"
	$(NEWEST_KERNELS)

# In an environment that is made anew: torch first, which nothing that follows may replace.
test-newest: override VENV := $(VENV)-newest
test-newest:  ## Run the CPU tests with the newest release of everything, so that users do not meet it first
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --no-compile torch
	$(VENV)/bin/python -m pip freeze | grep -E '^(torch|triton)==' > $(VENV)/torch.txt
	$(PIP) --no-compile -e '.[$(EXTRAS)]'
	$(PIP) --no-compile --no-deps --target $(VENV)/float8 torchao
	$(VENV)/bin/python -m pip freeze | grep -E '^(torch|triton)==' | diff $(VENV)/torch.txt -
	$(VENV)/bin/python -m pip list
	$(CPU_TESTS) -m "$(EVERY_CPU_TEST)"

# Trainers that recipes/trainers changes. Their requirements exclude each other's, and ours of transformers.
FRAMEWORKS = axolotl verl swift automodel
test-frameworks: $(FRAMEWORKS:%=test-framework-%)  ## Run tests inside other trainers, each in an environment of its own

RELEASE_verl = triton==3.6.0 verl==0.9.1
test-framework-verl: OLDEST = verl==0.9.0  # that the file accepts
RELEASE_swift = triton==3.6.0 ms-swift==4.6.0
RELEASE_automodel = triton==3.6.0 nemo-automodel==0.7.0
RELEASE_axolotl = axolotl==0.21.0
# Its torch is the build for CUDA, with 4 GB of libraries.
test-framework-axolotl: PYTHON = python3.12

test-framework-%:
	@$(PYTHON) --version || { echo "$@ must find $(PYTHON); install it, or make $@ PYTHON=its path" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -q --disable-pip-version-check --upgrade pip
	$(VENV)-$*/bin/python -m pip install -q --disable-pip-version-check --no-compile torch==2.13.0 $(RELEASE_$*) \
		pytest pytest-timeout -e .
	set -e; for release in '' $(OLDEST); do \
		test -z "$$release" || $(VENV)-$*/bin/python -m pip install -q --disable-pip-version-check --no-compile $$release; \
		OMP_NUM_THREADS=1 $(VENV)-$*/bin/python -m pytest tests/frameworks/test_$*.py; \
	done

# megatron-core asks for Python 3.12, but runs on 3.11, which CI has.
test-megatron: override VENV := $(VENV)-megatron
test-megatron:  ## Compare Megatron-core's own training on CPU rings with one process, in an environment of its own
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --upgrade pip
	$(INSTALL) torch==2.13.0 triton numpy packaging pytest pytest-timeout
	set -e; for version in 0.17.0 0.19.2; do \
		$(PIP) --no-compile --no-deps --ignore-requires-python --target $(VENV)/$$version megatron-core==$$version; \
		PYTHONPATH=$(abspath $(VENV))/$$version $(PYTEST) tests/megatron; \
	done

# torchtitan 0.3 needs torch 2.14, of which PyPI has only the build for CUDA, with 4 GB of libraries.
test-torchtitan: override VENV := $(VENV)-torchtitan
test-torchtitan:  ## Compare torchtitan's own Trainer on CPU rings with one process, in an environment of its own
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --no-compile torch==2.14.1 torchtitan==0.3.0 pytest pytest-timeout -e '.[torchtitan]'
	OMP_NUM_THREADS=1 $(PYTEST) tests/torchtitan

test-gpu: $(VENV)/.ready  ## Run the kernel tests on one Hopper GPU
	$(PYTEST) tests -m "gpu or every_kernel"

test-multi-gpu: $(VENV)/.ready  ## Run the distributed tests on all GPUs
	$(PYTEST) tests -m multi_gpu

lint: $(VENV)/.ready  ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.ready  ## Build the site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.:kernels $(VENV)/bin/mkdocs build -q

figures: $(VENV)/.ready  ## Draw the figures and write the tables of docs/ from the code and the committed results
	PYTHONPATH=.:kernels $(VENV)/bin/python -m benchmarks.draw_figures
	PYTHONPATH=.:kernels $(VENV)/bin/python -m benchmarks.write_tables

format: $(VENV)/.ready  ## Rewrite the sources in the house's format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## Remove the environment and what runs left behind
	rm -rf $(VENV) runs build dist

# torchao has a folder of its own: whatever imports peft would import it, too, for 4 seconds.
# A CUDA build of torch that is already installed is used as it is; otherwise CI's versions are installed.
# pip of 2023, which comes with Python 3.11, takes more than twice as long over these packages as the newest.
$(VENV)/.ready: pyproject.toml .ci/constraints.txt
	@if $(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then \
		echo "using the installed CUDA torch"; \
		$(PYTHON) -m venv --system-site-packages $(VENV) && $(PIP) --upgrade pip && \
		$(PIP) -e '.[$(EXTRAS)]'; \
	else \
		$(PYTHON) -m venv $(VENV) && $(PIP) --upgrade pip && \
		$(INSTALL) torch==2.13.0 && $(INSTALL) -e '.[$(EXTRAS)]'; \
	fi
	@$(PIP) --no-compile --no-deps --target $(VENV)/float8 torchao==0.18.0
	@touch $@

$(VENV)/triton-%: $(VENV)/.ready
	@$(PIP) --no-compile --no-deps --upgrade --target $@ triton==$*
	@touch $@
