# Two commands set everything up on a fresh clone: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   ?= runs/demo
WORKERS ?= 8
# One thread per process: two test workers share two cores, and single-threaded sums repeat exactly.
TESTS  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

.PHONY: help venv demo test test-slow test-gpu lint check clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(VENV)/ready  ## make .venv and install the pinned versions

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hybrid-zoo needs Python 3.11 or newer; name one: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt 'torch==2.13.0'
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,tokenizers,tiktoken,parquet,zstd,safetensors]'
	@touch $@

demo: venv  ## explain a pattern, train three hybrids under one budget, compare them (DEMO=folder)
	$(BIN)/zoo explain GDN,SWA --recipe recipes/tiny_text.yaml
	$(BIN)/zoo compare GA GDN,SWA M2,GDN,SWA --recipe recipes/tiny_text.yaml --out $(DEMO)

test: venv  ## the tests that need no GPU
	$(TESTS) -m 'not gpu and not slow'

test-slow: venv  ## training checks, minutes each; their results are recorded in docs/
	$(BIN)/python -m pytest -q -s -m slow

# Most of their time is the compiler's: as many processes as cores, which take the GPUs in turn. Two tests time compilers and run alone.
test-gpu:  ## on a machine with a CUDA GPU, with its own Python (WORKERS=16: processes)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -m gpu -n $(WORKERS) --dist worksteal -rs --failures gpu-failures.txt
	$(PYTHON) -m pytest -q -m gpu tests/kernels/test_delta_triton_gpu.py -k first_call

lint: venv  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

check: lint test  ## all that a merge needs

clean:  ## remove what the commands above made, runs excepted
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
