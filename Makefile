# make demo    replay two bundled traces and write a report      make demo TRACE=path/to/trace.jsonl
# make test    all tests                                         make lint types   style and types
# make validate      simulated against measured on this machine, 12 minutes on two quiet cores
# make bench   how fast simulator and kernels are here           make conform      agreement with vLLM's logs
# make compiled      the simulation loop compiled, in out/compiled; make test-compiled runs its tests
#
# Everything runs in .venv, which is made on first use. PYTHON chooses the interpreter it is made from, TORCH the
# build of torch that the tests use (a CPU one serves; with a GPU, give one that matches its driver).

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
TRACE ?= long-context openhands
OUT ?= out
DEVICE ?= cpu
HISPARSIM_REFERENCE ?= ../shared

VENV := .venv
BIN := $(VENV)/bin
CODE := sim realrun kernels traces reports tests hatch_build.py
PACKAGES := hisparsim hisparsim_realrun hisparsim_kernels hisparsim_traces hisparsim_reports
KERNEL_ENV := TRITON_INTERPRET=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1

.PHONY: help venv dev demo validate validate-full test test-main test-kernels compiled test-compiled lint format types bench conform kernels-aot clean
.DEFAULT_GOAL := help

help:
	@sed -n "1,5s/^# //p" Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The simulator alone: no torch.
$(VENV)/.simulator: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	@touch $@

# What tests, linters and the real runner need.
$(VENV)/.development: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]' $(TORCH) triton==3.6.0 'numpy<2.4'
	@touch $@ $(VENV)/.simulator

venv: $(VENV)/.simulator
dev: $(VENV)/.development

demo: venv
	@for trace in $(TRACE); do \
	  name=$$(basename "$$trace" | sed 's/\..*//'); \
	  rm -rf "$(OUT)/demo/$$name"; \
	  $(BIN)/hisparsim replay "$$trace" --out "$(OUT)/demo/$$name" || exit $$?; \
	  echo; \
	done
	@echo "Reports, to open in a browser:"
	@for trace in $(TRACE); do \
	  echo "  $(OUT)/demo/$$(basename "$$trace" | sed 's/\..*//')/report/index.html"; \
	done

test: test-main test-kernels

test-main: dev
	HISPARSIM_REFERENCE=$(HISPARSIM_REFERENCE) $(BIN)/python -m pytest tests --ignore=tests/kernels -n $(JOBS)

# The kernel tests choose Triton's interpreter, which must not leak into the others.
test-kernels: dev
	$(KERNEL_ENV) $(BIN)/python -m pytest tests/kernels -n $(JOBS)

# The simulation loop compiled with mypyc, and the tests of the simulator on it.
$(OUT)/compiled: $(shell find sim realrun kernels traces reports -path '*/hisparsim*' -type f ! -name '*.pyc') hatch_build.py pyproject.toml | dev
	rm -rf $@
	HISPARSIM_COMPILE=1 $(BIN)/python -m pip install -q --no-deps --target $@ .
	@touch $@

compiled: $(OUT)/compiled
	@echo "PYTHONPATH=$(abspath $(OUT)/compiled) $(BIN)/hisparsim --version"
	@PYTHONPATH=$(abspath $(OUT)/compiled) $(BIN)/hisparsim --version

test-compiled: $(OUT)/compiled
	PYTHONPATH=$(abspath $(OUT)/compiled) HISPARSIM_REFERENCE=$(HISPARSIM_REFERENCE) \
	  $(BIN)/python -m pytest tests/sim tests/realrun/test_ranks.py -n $(JOBS)

lint: dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

format: dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

types: dev
	$(BIN)/mypy $(addprefix -p ,$(PACKAGES))

# Other simulators, each in an environment of its own; one that cannot be installed is left out.
$(OUT)/peers/vidur:
	$(PYTHON) -m venv $@ && $@/bin/python -m pip install -q vidur==0.0.26 \
	  || { rm -rf $@; echo "vidur could not be installed: left out"; }

$(OUT)/peers/dynamo:
	$(PYTHON) -m venv $@ && $@/bin/python -m pip install -q --no-deps ai-dynamo==1.4.2 ai-dynamo-runtime==1.4.2 \
	  && $@/bin/python -m pip install -q msgspec transformers 2> /dev/null \
	  || { rm -rf $@; echo "dynamo could not be installed: left out"; }

bench: dev $(OUT)/compiled $(OUT)/peers/vidur $(OUT)/peers/dynamo
	@mkdir -p $(OUT)/bench
	@trace="$(HISPARSIM_REFERENCE)/traces/mooncake/conversation_trace.first4000.jsonl"; \
	  given=$$(test -f "$$trace" && echo --trace "$$trace"); compiled=$(abspath $(OUT)/compiled); \
	  $(BIN)/python -m hisparsim.des.benchmark --scaling --json $(OUT)/bench/simulator.json $$given; echo; \
	  PYTHONPATH=$$compiled $(BIN)/python -m hisparsim.des.benchmark --scaling \
	    --json $(OUT)/bench/compiled.json $$given; echo; \
	  $(BIN)/python -m hisparsim.des.peers --compiled $$compiled --json $(OUT)/bench/peers.json \
	    $$(for peer in vidur dynamo; do \
	      test -d $(OUT)/peers/$$peer && echo --$$peer $(abspath $(OUT)/peers)/$$peer/bin/python; done)
	$(BIN)/hisparsim kernels bench --device cpu --json > $(OUT)/bench/kernels.json
	@echo "$(OUT)/bench: simulator.json compiled.json peers.json kernels.json"

# Simulated against measured on this machine: four policies, or every one (DEVICE=cuda on a GPU).
validate: dev
	@rm -rf $(OUT)/validation
	$(BIN)/hisparsim validate --device $(DEVICE) --out $(OUT)/validation

validate-full: dev
	@rm -rf $(OUT)/validation-full
	$(BIN)/hisparsim validate --device $(DEVICE) --every-policy --out $(OUT)/validation-full

conform: dev
	$(BIN)/hisparsim conform $(HISPARSIM_REFERENCE)/reference/vllm_oracle

kernels-aot: dev
	$(BIN)/python -m hisparsim_kernels aot

clean:
	rm -rf $(OUT) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
