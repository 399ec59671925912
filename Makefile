# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv on its first call.
PYTHON ?= python3
VENV   ?= .venv
# Extra words for pip, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for the small CPU build of torch.
PIP_ARGS ?=
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
DEMO_ARGS ?=
TEST_ARGS ?=
# Most of a long test is waiting (for a lease to end, a rank to hang), so two at a time fit two cores; a file's tests stay together.
TEST_JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test soak lint format bench clean

help:            ## what this Makefile can do
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

# The stamp is newer than what it was made from: a second call installs nothing and starts at once.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("surefoot needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Say which one: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing surefoot and what it needs into $(VENV) (torch is the large one)"
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

# The linters (pyright brings a Node.js) are installed by those who lint.
$(VENV)/.installed-lint: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[lint]'
	@touch $@

# boto3, which the checkpoint benchmark and one of the long tests measure against.
$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

demo: $(VENV)/.installed   ## train on real text through a killed rank, a hang, a lost node and a dead controller
	$(BIN)/surefoot demo $(DEMO_ARGS)

test: $(VENV)/.installed   ## all tests (below 15 minutes on 2 cores)
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --durations=20 -m "not soak" $(TEST_ARGS)

soak: $(VENV)/.installed-bench   ## the long tests that `make test` leaves out
	$(BIN)/python -m pytest --durations=20 -m soak $(TEST_ARGS)

lint: $(VENV)/.installed-lint   ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-lint ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-bench ## restart against torchrun, checkpoints against torch DCP and boto3 (25 minutes, 20 GB of memory)
	$(BIN)/python bench/restart.py --json
	$(BIN)/python bench/ckpt.py --json

clean:           ## remove the virtual environment
	rm -rf $(VENV)
