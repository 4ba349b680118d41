# `make help` lists the targets; ARGS="..." passes flags on to what they run, and MODEL, DP, TP, EP,
# A2A, SPARES and DRAFTS say what demo and serve start. The virtual environment is made on first use, in .venv,
# and brought up to date when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python deploy/local/install.py
PROTOS := $(wildcard protos/*/v1/*.proto)
# The public API of the last release, which changes are checked against.
RELEASED := protos/released.binpb
# One thread for each process: more would wait for each other, as there is a process for each core.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -p no:cacheprovider
QUICK_TESTS := tests/repo tests/protos tests/router tests/executor

# make demo MODEL=deploy/demo_model DP=2 TP=2 EP=4 A2A=torch DRAFTS=eagle
TOPOLOGY = $(if $(MODEL),--model $(MODEL)) \
	$(if $(DP),--dp-size $(DP)) $(if $(TP),--attn-tp-size $(TP)) \
	$(if $(EP),--ep-size $(EP)) $(if $(A2A),--moe-a2a $(A2A)) $(if $(SPARES),--spares $(SPARES)) \
	$(if $(DRAFTS),--draft-model deploy/demo_drafts/$(DRAFTS))

# What is installed: to run Lockstep, and besides to work on it.
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev

# Bytecode is written even if the environment forbids it: else each process compiles it again, for 0.2 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test tests quick fix sim nothing-stops attack check bench sanitize gpu protos released dist images-test lock venv clean

help:
	@echo "make demo    start two executors and a router, ask them 300 problems, check the answers;"
	@echo "             DP=2 TP=2 EP=4 A2A=torch say how executors share the model (executor/README.md)"
	@echo "             MODEL=deploy/demo_model_mla serves a DeepSeek-V3 that knows them, too;"
	@echo "             ARGS=--speculative drafts, too, and compares with not drafting"
	@echo "             SPARES=1 starts one more, which takes a lost one's place (router/README.md)"
	@echo "make serve   start them and leave them running until Ctrl-C; MODEL, DP and others likewise"
	@echo "make quick   the checks, and the tests that start no processes"
	@echo "make test    every check and test"
	@echo "make fix     formatter, and lints that can be mended safely"
	@echo "make sim     a thousand simulated runs of the router with dying and hanging executors"
	@echo "make nothing-stops  executors are killed and stopped under 64 streams, a poison request among"
	@echo "             them, and groups formed 1,000 times: what is required and measured, as a table"
	@echo "make attack  hostile clients and executors, with an honest client beside each, as a table;"
	@echo "             ARGS='OLD .' attacks the checkout in OLD, too"
	@echo "make check   ruff, mypy and buf"
	@echo "make bench   benchmarks on this machine"
	@echo "make sanitize  tests of the CPU kernels under AddressSanitizer and UBSan"
	@echo "make gpu     checks and measurements that need a GPU, by rungs (tests/gpu/README.md)"
	@echo "make protos  regenerate the code of protos/*/v1/*.proto"
	@echo "make released  takes down the public API, which \`make check\` compares with from then on"
	@echo "make dist    the client library's wheel and an archive of the public API, in dist"
	@echo "make images-test  builds the images of router and CPU executor by buildah, starts and calls them"
	@echo "make lock    hashes of what the images install, after a change of versions; takes uv"
	@echo "make venv    the virtual environment with all that the targets above need"
	@echo "make clean   remove the virtual environment and caches"

demo: $(RUN)
	@$(BIN)/python -m deploy.local.demo $(TOPOLOGY) $(ARGS)

serve: $(RUN)
	@$(BIN)/python -m deploy.local.serve $(TOPOLOGY) $(ARGS)

# The checks run beside the tests. Processes take whole files of tests, the longest first; there are
# half as many again as cores and one, since tests that start others mostly wait. What starts nothing is quick.
test: $(DEV)
	@$(MAKE) --no-print-directory -j2 check tests

tests: $(DEV)
	$(PYTEST) -n $$(( $$(nproc 2>/dev/null || sysctl -n hw.ncpu) * 3 / 2 + 1 )) --dist loadfile \
		--no-loadscope-reorder $(ARGS)

quick: check
	$(PYTEST) -n auto --dist loadfile -q -m "not slow" $(QUICK_TESTS) $(ARGS)

fix: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

attack: $(DEV)
	@$(BIN)/python -m tests.attack $(ARGS)

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against $(RELEASED)

sim: $(DEV)
	LOCKSTEP_SIM_SEEDS=1000 $(BIN)/python -m pytest tests/sim tests/together/fuzz/test_two_routers.py $(ARGS)

nothing-stops: $(DEV)
	@$(BIN)/python -m tests.e2e.nothing_stops $(ARGS)

bench: $(DEV)
	$(BIN)/python -m tests.bench $(ARGS)

# Sanitizers must be there before Python is, as must what throws PyTorch's exceptions.
SANITIZERS = -fsanitize=address,undefined -fno-sanitize-recover=undefined -g
sanitize: $(DEV)
	LOCKSTEP_CPU_KERNELS_FLAGS="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(for name in \
		libasan.so libubsan.so libstdc++.so.6; do g++ -print-file-name=$$name; done | xargs)" \
		$(PYTEST) tests/executor/model/cpu_kernels --deselect \
		tests/executor/model/cpu_kernels/test_library.py $(ARGS)

# Without a network, a Python that has PyTorch for CUDA, packages and kernels that were carried there
# (tests/gpu/README.md): make gpu GPU_PYTHON=python3 WHEELS=carried KERNELS='aot.tar.xz more.tar.xz'
gpu: $(if $(GPU_PYTHON),,$(DEV))
	$(or $(GPU_PYTHON),$(BIN)/python) -m tests.gpu $(if $(WHEELS),--wheels $(WHEELS)) \
		$(if $(KERNELS),--kernels $(KERNELS)) $(ARGS)

protos: $(DEV)
	$(BIN)/python -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --python_out=. \
		--mypy_out=quiet:. --grpc_python_out=. --mypy_grpc_out=quiet:. $(PROTOS)

# Part of a release (deploy/README.md).
released: $(DEV)
	$(BIN)/buf build protos --path protos/serving --exclude-source-info -o $(RELEASED)

dist: $(RUN)
	@$(BIN)/python -m deploy.release.dist $(ARGS)

images-test: $(DEV)
	LOCKSTEP_IMAGES=1 $(PYTEST) -s tests/deploy/images $(ARGS)

# Every file of every package, for Linux on any processor. The demo's executor takes PyTorch from an
# index of its own, without CUDA's libraries, which a Mac does not have either. Routers and the demo go
# without the client of a model hub, which tokenizers asks for and nothing here calls.
LOCK = echo setuptools | uv pip compile --quiet --generate-hashes --no-annotate \
	--custom-compile-command "make lock" --constraints constraints.txt
NO_HUB = $(addprefix --no-emit-package ,huggingface-hub hf-xet anyio h11 httpcore2 httpx2 idna packaging \
	pyyaml tqdm truststore)

lock:
	$(LOCK) --python-version 3.11 --python-platform linux --extra gateway --extra tracing $(NO_HUB) \
		--no-emit-package filelock --no-emit-package fsspec pyproject.toml - -o deploy/docker/router.lock
	export MACOSX_DEPLOYMENT_TARGET=14.0; \
	$(LOCK) --python-version 3.11 --python-platform aarch64-apple-darwin --extra executor $(NO_HUB) \
		--no-emit-package torch pyproject.toml - -o deploy/docker/executor-cpu.lock
	$(LOCK) --python-version 3.12 --python-platform linux --extra cuda pyproject.toml - \
		-o deploy/docker/executor.lock

venv: $(DEV)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Lockstep needs Python 3.11 or newer, and '$(PYTHON)' is not."; \
		echo "Name one that is: make PYTHON=python3.12 ..."; exit 1; } >&2
	@$(PYTHON) -m venv $(VENV)

$(RUN): pyproject.toml constraints.txt | $(BIN)/python
	@$(INSTALL) run
	@$(BIN)/python -m executor.model.cpu_kernels
	@touch $@

$(DEV): $(RUN) deploy/requirements-flashinfer.txt
	@$(INSTALL) dev
	@touch $@
