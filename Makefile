# One line a contributor can run for each thing CI and README promise. `make setup` runs by itself where it is needed.
# RELEASE=0.5.17 does it with another supported SGLang, in an environment of its own.
PYTHON ?= python3
RELEASE ?=
RELEASES := 0.5.15.post1 0.5.17 0.5.23
VENV := .venv$(addprefix -,$(RELEASE))
PY := $(VENV)/bin/python
BENCH := PYTHONPATH=bench$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY)
UV = $(shell uv --version >/dev/null 2>&1 && echo uv || echo .tools/bin/uv)

# SGLang picks its CPU engine by this variable; a machine with an NVIDIA driver keeps its GPU.
ifeq ($(wildcard /dev/nvidiactl),)
export SGLANG_USE_CPU_ENGINE ?= 1
endif

ifneq ($(filter-out $(RELEASES),$(RELEASE)),)
$(error RELEASE is '$(RELEASE)': expected one of $(RELEASES), or nothing for the release of uv.lock's default groups)
endif

# SGLang compiles a C++ hash when it first needs it. A server that is killed meanwhile leaves a lock behind, for which the
# older releases wait without end: so each environment has its own folder, and locks go before anything runs.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch-extensions

WALKS := $(addprefix tests/contract/,cache/test_radix_cache_model.py decode_budget tiers/test_tiers_model.py tiers/test_state_machine.py)

SHOWS := $(addprefix show-,foundation policy tiers profiler bench decode kernels mend load house codecs releases budgets operator trust)

.PHONY: help setup test check contract check-release drift dist demo $(SHOWS) chaos soak soak-cache bench bench-load clean

help:
	@echo "make demo             LRU, LRU over host RAM and SSD, EvicPress, and a cache that holds everything, side by side; about 6 minutes"
	@echo "make test             every test: two processes at first, then one by one those that need all the time there is; REPORTS=DIR keeps JUnit files"
	@echo "make check            ruff, ruff format, mypy"
	@echo "make contract         only the tests of what we assume about SGLang"
	@echo "make check-release    what CI asks of another release, RELEASE=R: the cache's contract tests, exact, off is stock, salts through the SSD; 6 minutes"
	@echo "make drift            rows of the hook table that SGLang's newest wheel, or VERSION's, does not have; seconds"
	@echo "make dist             sdist and wheel in dist/, tried in a clean environment"
	@echo "make show-foundation  measure every promise a machine without a GPU can, at most 30 minutes"
	@echo "make show-policy      measure the policy: near the optimum, fast, better than its rivals, true to quality targets; at most 60 minutes"
	@echo "make show-tiers       measure host memory and SSD: bandwidth, kill -9, chaos, restart; at most 30 minutes"
	@echo "make show-profiler    measure the profiler: insights, held-out questions, scorers, figure 10, what users notice; at most 30 minutes"
	@echo "make show-bench       every system side by side on real servers, and the papers' figures; at most 60 minutes"
	@echo "make show-decode      measure budgets of running requests: exact, gauge, room, cost, accuracy; at most 20 minutes"
	@echo "make show-kernels     compile and interpret every kernel, attention over compact rows, the GPU script's packing; at most 20 minutes"
	@echo "make show-mend        hostile clients, SSD folders that others prepared, what users saw go wrong; at most 25 minutes"
	@echo "make show-load        a setting under load up to twice saturation, chaos there, the published grid; at most 40 minutes"
	@echo "make show-house       measure the structure: sizes, types, names, prose, parts, and every other area at its quick size; 15 minutes"
	@echo "make show-codecs      codecs: bytes, speed, loss, servers with bfloat16 KV beside a grid of fixed forms, simulation; at most 60 minutes"
	@echo "make show-releases    every supported SGLang: exact, off is stock, salts, restart, budgets, storm; overhead; at most 75 minutes"
	@echo "make show-budgets     layer budgets on the small model: found, expanded, three seeds, one search, heads, servers; at most 45 minutes"
	@echo "make show-operator    series, alerts, page, floors, errors, commands; needs apt-get install prometheus chromium; at most 25 minutes"
	@echo "make show-trust       KV events, SGLang's router, a shared store, damaged files, ranks, SGLang's behaviours, a soak; needs pip install"
	@echo "                      sglang-router mooncake-transfer-engine-non-cuda nixl, apt-get install libibverbs1 librdmacm1; 40 minutes"
	@echo "make show-... QUICK=1 the same in at most 2 minutes: smaller sizes, and what they cannot judge is not judged"
	@echo "make chaos            the real server on host memory and an SSD that fail on purpose, 5 minutes and two starts"
	@echo "make soak             64 streaming clients, everything on, kill -9 twice: 30 minutes, or SECONDS=N; prints its seed, SEED=N repeats it"
	@echo "make soak-cache       without a server: the walks that make test leaves out, then the state machine with new seeds for SECONDS=3600"
	@echo "make bench            the serving benchmark: every system side by side on the CPU testbed; goes on where it was stopped"
	@echo "make bench-load       four settings up to twice saturation, three repetitions: hours; goes on where it was stopped"
	@echo "make setup            only .venv, from uv.lock (uv is fetched when it is missing)"
	@echo "make ... RELEASE=R    the same with SGLang R, one of $(RELEASES), in .venv-R"

setup: $(VENV)/.ready
	@rm -f $(TORCH_EXTENSIONS_DIR)/*/lock

$(VENV)/.ready: pyproject.toml uv.lock bench/evicbench/releases/cpu_shim.py
	@$(UV) --version >/dev/null 2>&1 || { rm -rf .tools && $(PYTHON) -m venv .tools && .tools/bin/python -m pip install --quiet uv; } \
	|| { rm -rf .tools && $(PYTHON) -m pip install --quiet --target .tools uv; } \
	|| { echo "setup needs uv, and $(PYTHON) has no pip to fetch it with: install python3-venv or uv, then run make again" >&2; exit 1; }
	UV_PROJECT_ENVIRONMENT=$(VENV) $(UV) sync --locked \
		$(if $(RELEASE),--no-default-groups --group dev --group release-$(subst .,-,$(RELEASE)),--compile-bytecode) \
		$(if $(filter file,$(origin PYTHON)),,--python $(PYTHON))
	$(PY) bench/evicbench/releases/cpu_shim.py
	@touch $@

test: setup
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone and not soak" $(REPORTS:%=--junitxml=%/two-processes.xml)
	$(PY) -m pytest -m alone $(REPORTS:%=--junitxml=%/alone.xml)

check: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

contract: setup
	$(PY) -m pytest -n 2 --dist loadfile -m "not soak" tests/contract

check-release: setup
	EVICPRESS_FORKED_START=1 $(BENCH) -m evicbench.releases.here --quick install contract exactness stock salts

drift: setup
	$(BENCH) -m evicbench.releases.drift $(VERSION)

dist: setup
	rm -rf build dist
	$(UV) build
	$(UV) pip install --quiet --no-deps --target build/installed dist/*.whl
	cd build && ../$(PY) -I -c "import sys; sys.path.insert(0, 'installed'); import sglang_evicpress as p; print(p.__version__, p.__file__)"
	$(PY) -m zipfile -l dist/*.whl

demo: setup
	$(BENCH) -m evicbench.demo

$(SHOWS): setup
	$(PY) bench/show.py $(@:show-%=%) $(if $(QUICK),--quick)

soak-cache: setup
	$(if $(SEED),EVICPRESS_SOAK_SEED=$(SEED)) EVICPRESS_SOAK_SECONDS=$(or $(SECONDS),3600) \
		$(PY) -m pytest -s -m soak -o faulthandler_timeout=0 $(WALKS)

chaos: setup
	$(PY) bench/show.py tiers --only chaos

soak: setup
	$(BENCH) -m evicbench.trust.soak $(SECONDS:%=--seconds %) $(SEED:%=--seed %)

bench: setup
	$(VENV)/bin/evicpress bench serve --config bench/configs/cpu-testbed.yaml

bench-load: setup
	$(BENCH) -m evicbench.load

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
