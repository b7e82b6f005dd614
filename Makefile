# `make acceptance` and `make test` do all their own set-up. Python 3.11 or newer; torch only where something is measured.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# The torch of rehearsals and tests. A host with GPUs brings its own, or the wheelhouse does.
TORCH ?= torch==2.13.0 numpy pillow
# Counted on the PCI bus: a driver that is broken must not turn an acceptance into a rehearsal.
GPUS := $(shell grep -ls '^PCI_ID=10DE:' /sys/bus/pci/devices/*/uevent | xargs -r grep -lE '^PCI_CLASS=30[02]00$$' | wc -l)
ifeq ($(GPUS),0)
INVENTORY ?= inventory/local/rehearsal.yml
else
INVENTORY ?= inventory/local/gpu.yml
endif
RUN_ID := $(shell date -u +%Y%m%dT%H%M%SZ)

.PHONY: help acceptance test test-gpu lint dev clean count-gpus

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

acceptance: $(STAMP) ## Accept INVENTORY (default: this machine; a rehearsal where it has no GPU)
	@RACKPROOF_RUN=$(or $(RACKPROOF_RUN),$(RUN_ID)); \
	$(BIN)/ansible-playbook -i $(INVENTORY) playbooks/acceptance.yml -e rackproof_run_id=$$RACKPROOF_RUN $(ARGS) && played=yes; \
	if [ ! -e runs/$$RACKPROOF_RUN/plan.json ]; then echo "no run was begun: the cause stands above" >&2; exit 2; fi; \
	$(BIN)/rackproof report runs/$$RACKPROOF_RUN && [ "$$played" = yes ] # an older report must not speak for a run that failed

count-gpus: ## Print how many NVIDIA GPUs are on this machine's PCI bus
	@echo $(GPUS)

dev: $(STAMP) ## Make the virtual environment
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps torchvision==0.28.0
	touch $@

lint: $(STAMP) ## Style, types, imports, Ansible, YAML, criteria packs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict .
	PATH=$(CURDIR)/$(BIN):$$PATH ANSIBLE_HOME=$(CURDIR)/.ansible $(BIN)/ansible-lint --offline --strict
	$(BIN)/rackproof criteria lint

# What the agent needs, as wheels: lab hosts have no network.
WHEELHOUSE := build/wheelhouse/.ready
$(WHEELHOUSE): $(STAMP)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --wheel-dir $(@D) .
	rm $(@D)/rackproof-*.whl
	touch $@

test: lint $(WHEELHOUSE) ## Everything that needs no GPU, with its gates
	$(BIN)/pytest --numprocesses 3 --dist loadfile

test-gpu: $(STAMP) ## What needs GPUs, on a host that has them
	$(BIN)/pytest -m gpu tests/gpu

clean: ## Remove what was built here
	rm -rf $(VENV) build dist runs .lab
