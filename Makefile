# Two commands matter: `make demo` and `make test`. Each sets up everything it needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Pinned and installed first: any other spelling may pull gigabytes of accelerator libraries.
TORCH_SPEC ?= torch==2.13.0
export OMP_NUM_THREADS ?= 1
# What a bare Debian lacks is installed once; without root this fails and names the package.
APT := DEBIAN_FRONTEND=noninteractive sh -c 'apt-get update -qq && apt-get install -y -qq "$$0"'

.PHONY: setup setup-postgres setup-network setup-slurm setup-criu k8s-control-plane demo test test-all lint \
  unit sim sim-soak chaos zoo network net-soak schedulers transparent test-gpu bench reports docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml src/keepstep/native/*/*.cpp src/keepstep/native/*/*.h
	@command -v g++ >/dev/null || $(APT) g++
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(APT) python3-venv
	@$(PYTHON) -c 'import os, sysconfig as s; os.stat(s.get_paths()["include"] + "/Python.h")' \
	  2>/dev/null || $(APT) python3-dev
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check numpy "$(TORCH_SPEC)"
	$(BIN)/pip install -q --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m keepstep.native
	touch $@

# Only tests need a server; each run starts a private one and removes it.
setup-postgres:
	@command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 \
	  || $(APT) postgresql || echo 'no PostgreSQL server: its tests are skipped'

# Likewise a private cluster. No daemon of the packages is started, and nothing in /etc is used.
SLURM := munge slurmctld slurmd slurmdbd slurm-client slurm-wlm-mysql-plugin mariadb-server
setup-slurm:
	@(for one in slurmctld slurmd slurmdbd mariadbd munged salloc; do \
	    command -v $$one >/dev/null || exit 1; done) \
	  || (DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 sh -c 'apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends $(SLURM)') \
	  || echo 'SKIPPED slurm: its packages cannot be installed here'

# A Kubernetes control plane for tests, built from Debian's source package: 12 minutes, once. It is
# kept in the cache folder; where it is not, its tests are skipped.
k8s-control-plane: setup
	@command -v dpkg-source >/dev/null || $(APT) dpkg-dev
	@$(BIN)/python tests/schedulers/control_plane_build.py

# Namespaces, links and queues of the network tests.
setup-network:
	@command -v tc >/dev/null || $(APT) iproute2 || echo 'no iproute2: network tests are skipped'

# CRIU >= 4.2, unpacked into the cache folder; without it the tests that need it are skipped.
setup-criu: setup
	@$(BIN)/python -m keepstep.native.criu

demo: setup
	$(BIN)/keepstep demo

test: setup lint unit sim network schedulers transparent chaos zoo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Side by side, because much of it waits for processes; the halves take about as long.
unit: setup setup-postgres
	@echo 'pytest -q tests/unit tests/integration, in two halves side by side'
	@($(BIN)/pytest -q tests/unit; unit=$$?; \
	  $(BIN)/pytest -q tests/integration/test_[a-d]*.py || unit=1; exit $$unit) \
	  > $(VENV)/unit.log 2>&1 & beside=$$!; \
	  $(BIN)/pytest -q tests/integration/test_[!a-d]*.py; other=$$?; \
	  wait $$beside; unit=$$?; cat $(VENV)/unit.log; exit $$((unit | other))

# The control plane in simulated worlds: every cell of the fault table, and a sample of 10,000 worlds
# and of the mutants, chosen by the commit id.
sim: setup
	$(BIN)/pytest -q --durations=3 tests/sim

# As many worlds as fit: make sim-soak SECONDS=1800
SECONDS ?= 600
SEED ?= 1000000
sim-soak: setup
	$(BIN)/keepstep sim --seed $(SEED) --seconds $(SECONDS) --jobs 2 --json

# Every scheduler through one suite, and jobs on a real Slurm cluster and a real Kubernetes control
# plane of this machine.
schedulers: setup setup-postgres setup-slurm
	$(BIN)/pytest -q tests/schedulers

# A sample of the fault matrix, chosen by the commit id (see tests/chaos/README.md).
chaos: setup setup-postgres
	$(BIN)/pytest -q tests/chaos

# Scripts as people write them, each killed several times; a sample (see tests/zoo/README.md).
zoo: setup
	$(BIN)/pytest -q tests/zoo

# The network plugin between namespaces: 60 faults, sanitizers, bad input.
network: setup setup-network
	$(BIN)/pytest -q tests/network

# One long run: make net-soak NET_FAULTS=1000
NET_FAULTS ?= 1000
net-soak: setup setup-network
	$(BIN)/python -m tests.network.soak --faults $(NET_FAULTS) --report benchmarks/results/net-soak.json

# Ranks of unmodified scripts moved as images of their processes; a sample.
transparent: setup setup-criu
	$(BIN)/pytest -q tests/transparent

test-all: export KEEPSTEP_ALL := 1
test-all: setup setup-postgres setup-criu setup-slurm k8s-control-plane lint unit network
	$(BIN)/pytest -q --durations=3 tests/sim --sim-all
	$(BIN)/pytest -q tests/schedulers --suite-report benchmarks/results/suite-schedulers.json
	$(BIN)/pytest -q tests/chaos --chaos-all --chaos-report benchmarks/results/chaos-full.json
	$(BIN)/pytest -q tests/zoo --zoo-all --zoo-report benchmarks/results/zoo.json \
	  --mutants-report benchmarks/results/mutants.json
	$(BIN)/pytest -q tests/transparent --transparent-all \
	  --suite-report benchmarks/results/suite-transparent.json

# On a machine with one NVIDIA GPU, with its own Python and torch: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -q tests/gpu --gpu-report benchmarks/results/gpu-$(shell date +%F).json

bench: setup
	$(BIN)/python -m benchmarks

# Which committed reports are older than the code under them.
reports: setup
	$(BIN)/python -m benchmarks.reports

# Pages that repeat what the code says; a unit test compares.
docs: setup
	$(BIN)/python docs/internals/generate.py

clean:
	rm -rf $(VENV)
