# Every target does its own set-up (scripts/setup makes .venv). Stages of `make test` are recorded in out/stages, and the last
# one fails if any is missing, so that nothing can be skipped silently.
SHELL := /bin/bash
PY := .venv/bin/python
export OMP_NUM_THREADS := 1
N ?= 20
SEEDS ?= 0:1500
TORCH ?= 2.14.1
# Where this project's Python is: a script of your own beside it is nobody's business.
PYTHON_CODE := setup.py tmd worker migrations tests bench examples
STAGES := lint fast daemon munge transport session simulator slurm rdma e2e soak install

.PHONY: help setup setup-tests setup-slurm setup-rdma plugins install demo soak bench-collectives bench-handoff slurm-up slurm-down test test-fast \
	test-slurm test-rdma test-pyslurm test-torch lint clean $(addprefix stage-,$(STAGES))

help:
	@echo "make demo       the whole thing in one command: a training run outlives a drained and a killed node"
	@echo "make soak N=20  N demo runs with random moments of drain and kill, all must be bit-identical"
	@echo "make bench-collectives  collectives against gloo's, into out/bench/collectives.json"
	@echo "make bench-handoff  how fast a state moves, and what a migration stops for, into out/bench/handoff.json"
	@echo "make test-fast  lint and the tests without database server and long runs of ranks"
	@echo "make test-slurm  the tests on a real Slurm cluster, started and stopped on this machine (as root), of Debian's Slurm"
	@echo "                or of the one that TMD_TEST_SLURM_PREFIX=/opt/slurm names; so do slurm-up and test-pyslurm"
	@echo "make test-rdma  the transfer of states and a migration over RDMA, in virtual machines with soft RoCE (as root, for its packages)"
	@echo "make test-pyslurm  the Slurm client through pyslurm, where Slurm 25.11 is installed"
	@echo "make slurm-up   such a cluster to play with, until make slurm-down"
	@echo "make plugins    what Slurm loads (needs a C compiler and libslurm-dev); make install DESTDIR=... puts it where Slurm looks"
	@echo "make test       everything"
	@echo "make test-torch TORCH=$(TORCH)  what runs PyTorch, with another release of it (5 GB)"

setup:
	@scripts/setup

demo: setup
	$(PY) -m tmd.demo --out out/demo

soak: setup
	$(PY) -m tmd.demo --out out/soak --soak $(N)

bench-collectives: setup
	$(PY) -m bench.collectives --out out/bench/collectives.json

bench-handoff: setup
	$(PY) -m bench.handoff --out out/bench/handoff.json

# Both are plugins/Makefile's, which also says what can be set: SLURM_PREFIX, PLUGIN_DIR, CONF_DIR.
plugins:
	@$(MAKE) --no-print-directory -C plugins check

install:
	@$(MAKE) --no-print-directory -C plugins install

setup-slurm:
	@scripts/setup-slurm

setup-rdma:
	@scripts/setup-rdma

slurm-up: setup setup-slurm
	@$(PY) -m tests.slurm up --nodes $(or $(NODES),4)

slurm-down: setup
	@$(PY) -m tests.slurm down

setup-tests: setup
	@scripts/setup-compiler
	@scripts/setup-postgres
	@scripts/setup-munge

test-fast: setup-tests
	@rm -rf out/stages out/flaky
	@$(MAKE) --no-print-directory stage-lint stage-fast

test-slurm: setup setup-slurm
	@rm -rf out/stages out/flaky
	@$(MAKE) --no-print-directory stage-slurm

test-rdma: setup setup-rdma
	@scripts/setup-compiler
	@rm -rf out/stages out/flaky
	@$(MAKE) --no-print-directory stage-rdma

# Not a stage of `make test`: no distribution carries that Slurm. It fails where it is missing.
test-pyslurm: setup setup-slurm
	@scripts/test-pyslurm

test: setup-tests setup-slurm setup-rdma
	@rm -rf out/stages out/flaky
	@for stage in $(STAGES); do $(MAKE) --no-print-directory stage-$$stage || exit 1; done
	@scripts/stages-complete $(STAGES)

test-torch:
	@scripts/setup-compiler
	@scripts/test-torch $(TORCH)

stage-lint:
	@scripts/stage lint bash -c '.venv/bin/ruff check $(PYTHON_CODE) && .venv/bin/ruff format --check $(PYTHON_CODE) && .venv/bin/mypy'

# What needs a Postgres, many processes or minutes has a stage of its own.
stage-fast:
	@scripts/stage fast scripts/pytest-stage tests $(addprefix --ignore tests/,daemon munge transport session slurm rdma e2e)

stage-daemon:
	@scripts/stage daemon scripts/pytest-stage tests/daemon

stage-munge:
	@scripts/stage munge scripts/pytest-stage tests/munge

stage-transport:
	@scripts/stage transport scripts/pytest-stage tests/transport

stage-session:
	@scripts/stage session scripts/pytest-stage tests/session

stage-simulator:
	@scripts/stage simulator $(PY) -m tests.simulator --seeds $(SEEDS) --jobs 2

# One after the other: a cluster is a dozen daemons. What was to be shown and is not in the report has not passed.
stage-slurm:
	@rm -f out/slurm/report.json
	@TEST_PROCESSES=1 scripts/stage slurm bash -c 'scripts/pytest-stage tests/slurm && $(PY) -m tests.slurm.report'

# In one process: its two virtual machines are booted once.
stage-rdma:
	@rm -f out/rdma/migration.json
	@TEST_PROCESSES=1 scripts/stage rdma bash -c 'scripts/pytest-stage tests/rdma && $(PY) -m tests.rdma.report'

# One after the other: each of them starts up to a dozen processes that import PyTorch.
stage-e2e:
	@TEST_PROCESSES=1 scripts/stage e2e scripts/pytest-stage tests/e2e

stage-soak:
	@scripts/stage soak $(PY) -m tmd.demo --out out/soak --soak 3

stage-install:
	@scripts/stage install scripts/check-install

clean:
	rm -rf .venv out build dist *.egg-info
