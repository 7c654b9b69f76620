# Every target sets up what it needs: a machine with Python, a C++ compiler and make is enough.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
JOBS   ?= 2

BIN   := .venv/bin
READY := .venv/.ready
OLD   := .venv-transformers4
PEERS := .venv-peers
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo demo-text test test-gpu test-transformers4 check bench bench-gpu bench-peers clean

help:
	@echo "make demo       train the GRPO example with images; results in out/demo"
	@echo "make demo-text  the one without images; results in out/text"
	@echo "make test       all tests, warnings are errors"
	@echo "make test-gpu   those that need a CUDA device; elsewhere they are skipped"
	@echo "make test-transformers4"
	@echo "                the tests of models on transformers 4"
	@echo "make check      ruff, mypy --strict, layers"
	@echo "make bench      all benchmarks, quickly"
	@echo "make bench-gpu  the benchmark of the ops on a CUDA device"
	@echo "make bench-peers"
	@echo "                the benchmark of transfer beside TransferQueue and others"
	@echo "make clean      remove what was built; .venv goes too"
	@echo "The first of them makes .venv with PYTHON=$(PYTHON) and TORCH='$(TORCH)'."

# torch comes first and by its version: the build of the extension needs it, and nothing else may choose it.
$(READY): pyproject.toml setup.py $(wildcard csrc/*)
	@test -x $(BIN)/python || { echo "venv: creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "venv: installing build tools"
	@$(PIP) 'setuptools>=77' wheel ninja
	@echo "venv: installing $(TORCH)"
	@$(PIP) $(TORCH)
	@echo "venv: building knit_data and installing what it needs"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/grpo_shapes.py --out out/demo

demo-text: $(READY)
	@$(BIN)/python examples/grpo_text.py --out out/text

test: $(READY)
	@$(BIN)/python -W error -m pytest --numprocesses $(JOBS) --dist loadfile

test-gpu: $(READY)
	@$(BIN)/python -W error -m pytest -m gpu

# Only what transformers 4 wants otherwise is installed a second time; the rest is that of .venv, named in a .pth file.
$(OLD)/.ready: $(READY)
	@echo "venv: creating $(OLD)"
	@rm -rf $(OLD)
	@$(BIN)/python -m venv $(OLD)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(OLD)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@echo "venv: installing transformers 4"
	@$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check 'transformers>=4.57,<5'
	@touch $@

test-transformers4: $(OLD)/.ready
	@PYTHONPATH=src $(OLD)/bin/python -W error -m pytest tests/integrations

check: $(READY)
	@echo "check: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@echo "check: mypy"
	@$(BIN)/mypy --no-error-summary
	@echo "check: layers"
	@$(BIN)/python -W error -m pytest --quiet tests/test_layers.py

bench: $(READY)
	@set -e; for file in benchmarks/bench_*.py; do \
	  echo "bench: $$file"; OMP_WAIT_POLICY=PASSIVE $(BIN)/python "$$file" --quick; done

bench-gpu: $(READY)
	@$(BIN)/python benchmarks/bench_ops.py --device cuda

# Their packages bring a hundred others, and Ray: they have an environment of their own, and what .venv has is that.
$(PEERS)/.ready: $(READY)
	@echo "venv: creating $(PEERS)"
	@rm -rf $(PEERS)
	@$(BIN)/python -m venv $(PEERS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@echo "venv: installing TransferQueue and Ray"
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check 'knit_data[peers]'
	@touch $@

bench-peers: $(PEERS)/.ready
	@OMP_WAIT_POLICY=PASSIVE PYTHONPATH=src $(PEERS)/bin/python benchmarks/bench_transfer.py

clean:
	@rm -rf .venv $(OLD) $(PEERS) build dist out src/*.egg-info src/knit_data/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
