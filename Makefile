# Everything starts here; every target makes the environment first if it has to. `make help` lists them.

VENV ?= .venv
PORT ?= 8000
CONFIG ?= deploy/cpu.yaml
ARGS ?=
PY = $(VENV)/bin/python
PYTEST = $(PY) -m pytest $(ARGS)
PACKAGES = sluice predictors policies actors app benchmarks
PAIR = tests/live/test_default_config.py $(wildcard tests/live/vllm_pair/test_*.py) tests/live/test_vllm_failures.py
SLOW = live or vllm or chaos or browser
# What only `make test-nightly` and `make test-hosts` run.
LATER = nightly or hosts
# The files whose tests have these markers: to collect all takes a minute. tests/conftest.py sees that none is missed.
IMPORTS_VLLM = $(shell grep -rl --include='test_*.py' 'mark\.vllm' tests)
VLLM = $(filter-out $(PAIR),$(filter tests/live/% tests/chaos/%,$(IMPORTS_VLLM)))
SIM = $(filter-out $(PAIR) $(VLLM),$(shell grep -rlE --include='test_*.py' 'mark\.(live|vllm|chaos|browser)' tests))
# The rooms of the compiled modules, and the files with tests that only pure Python allows.
HOT = tests/policies/state tests/policies/dispatch tests/actors/wire tests/app/api/test_chunks.py
PURE = $(filter-out $(addsuffix %,$(HOT)),$(shell grep -rl --include='test_*.py' 'mark\.pure' tests))
LIVE_APPS ?= 2
export VENV PORT CONFIG ARGS PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup environment setup-cuda setup-browser serve test test-fast test-pure test-live test-live-pair test-live-app test-live-vllm test-live-sim test-nightly test-hosts lint lint-format lint-rules lint-types lint-arrows lint-prose lint-figures format bench-capacity bench-predictors bench-decisions bench-overhead bench-peers bench-peers-real bench-gpu bench-permits bench-policies bench-scaling bench-scaling-live bench-streams bench-papers bench-transfer bench-truth bench-versus bench-watching bench-waterfall bench-mfs bench-overload bench-hostile bench-recompute chaos fuzz clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  variables: PORT=$(PORT) CONFIG=$(CONFIG) VENV=$(VENV) PYTHON=(found) ARGS=(to the program)"

setup: ## make the environment (two minutes; nothing to do afterwards; SLUICE_PURE=1: without compiled modules)
	@scripts/setup.sh cpu

environment: # the same, but compiled modules stay as they are: linters do not run them
	@COMPILE=no scripts/setup.sh cpu

setup-cuda: ## the same with the CUDA engine, for machines with NVIDIA GPUs (not together with `setup` in one VENV)
	@scripts/setup.sh cuda

setup-browser: ## install Debian's chromium for the tests of the dashboard's page (root; else it says how)
	@scripts/setup_browser.sh

serve: setup ## serve CONFIG on 127.0.0.1:PORT in the foreground
	@exec scripts/serve.sh

test: setup ## the tests: first the fast ones, then those that start Ray and engines; all parts run, whichever fails
	@$(MAKE) --no-print-directory --keep-going -j1 test-fast test-live-pair test-live-app

test-fast: setup ## the tests that start no Ray and no engine, on all cores (at most 4)
	OMP_NUM_THREADS=1 $(PYTEST) -m "not ($(SLOW) or $(LATER))" -n auto --maxprocesses 4 --dist worksteal
	@$(MAKE) --no-print-directory test-pure

test-pure: setup ## the tests of the modules that are compiled, in pure Python
	SLUICE_PURE=1 OMP_NUM_THREADS=1 $(PYTEST) -m "not ($(SLOW) or $(LATER))" -n auto --maxprocesses 4 --dist worksteal $(sort $(HOT) $(PURE))

test-live: setup ## the tests that start Ray and engines (two vLLM engines at a time)
	@$(MAKE) --no-print-directory --keep-going -j1 test-live-pair test-live-app

test-live-pair: setup
	$(PYTEST) -m "($(SLOW)) and not ($(LATER))" $(PAIR)

test-live-app: setup ## those of whole applications on vLLM, one at a time, then all others (LIVE_APPS at a time)
	@$(MAKE) --no-print-directory --keep-going -j1 test-live-vllm test-live-sim

test-live-vllm: setup
	$(PYTEST) -m "vllm and not ($(LATER))" $(VLLM)

test-live-sim: setup
	$(PYTEST) -m "($(SLOW)) and not ($(LATER))" -n $(LIVE_APPS) --dist loadfile --no-loadscope-reorder $(SIM)

test-nightly: setup ## the longest tests, one at a time: what takes an application or an engine of its own for minutes
	$(PYTEST) -m "nightly and not hosts" tests

test-hosts: setup ## faults between hosts, which are network namespaces (needs root; 20 minutes; ARGS="-k vllm": one of them)
	$(PYTEST) -s -m hosts tests/hosts

lint: lint-format lint-rules lint-types lint-arrows lint-prose lint-figures ## format, rules, types, import arrows, sentences, figures (make -k lint: all findings)

lint-format: environment
	$(VENV)/bin/ruff format --check .

lint-rules: environment
	$(VENV)/bin/ruff check .

lint-types: environment
	$(VENV)/bin/mypy $(PACKAGES)

lint-arrows: environment
	$(VENV)/bin/lint-imports

lint-prose: environment
	$(PY) scripts/check_prose.py

lint-figures: environment ## whether the documents show the figures of the committed results, and which code made these
	$(PY) -m benchmarks check

format: environment ## apply the formatter and the safe fixes
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench-predictors: setup ## accuracy and cost of the length predictors
	$(PY) -m benchmarks.predictors $(ARGS)

bench-decisions: setup ## time of a routing decision, a dispatcher tick, an event, an index lookup
	$(PY) -m benchmarks.decisions $(ARGS)

bench-permits: setup ## time of a permit of the flow arbiter among 1,000 flows; reads without permits by how long an agent may be silent
	$(PY) -m benchmarks.permits $(ARGS)

bench-policies: setup ## live: policies switched under load, balance (also with a pool that waits for a minute, and on vLLM), NetKV on two tiers, the composition's TTFT
	$(PY) -m benchmarks.live.switching
	$(PY) -m benchmarks.live.balance
	$(PY) -m benchmarks.live.balance --setup waits
	$(PY) -m benchmarks.live.balance --setup waits-vllm
	$(PY) -m benchmarks.live.netkv_tiers
	$(PY) -m benchmarks.live.composition

bench-papers: setup ## the papers' figures re-run at a reduced size: paper, ours, difference (on excerpts and generators; python -m benchmarks traces says how to have the traces)
	$(PY) -m benchmarks run all --quick $(ARGS)

bench-scaling: setup ## scaling policies in the simulator: a day, a shifting ratio, a burst, 24 steady hours, forks, 1,024 engines
	$(PY) -m benchmarks run scaling_tuning scaling_diurnal scaling_ratio_shift scaling_burst scaling_steady scaling_fork scaling_scale $(ARGS)

bench-scaling-live: setup ## live: a burst, activations, pools of 64 engines, 200 streams through changes; vLLM's starts by step, switches, drains
	$(PY) -m benchmarks.live.scaling
	$(PY) -m benchmarks.live.scaling_steps

bench-overhead: setup ## what Sluice adds to an engine (latency, throughput, CPU, memory), then bench-peers and bench-peers-real (two and a half hours in all; ARGS=--quick: all three, short; ARGS="--only sim": without the peers)
	$(PY) -m benchmarks.live.overhead $(ARGS)
	$(if $(findstring --only,$(ARGS)),,@$(MAKE) --no-print-directory bench-peers bench-peers-real ARGS="$(filter --quick,$(ARGS))")

bench-waterfall: setup ## where the time to the first token goes in bursts of clients, hop by hop (sim engines; a minute)
	$(PY) -m benchmarks.live.waterfall $(ARGS)

bench-peers: setup ## Sluice beside vllm-router (from PyPI, in an environment of its own) on engines that tick alike, in turn (an hour; ARGS=--quick: 4 minutes)
	$(PY) -m benchmarks.peers $(ARGS)

bench-peers-real: setup ## on real engines, in turn: Sluice, vllm-router and Ray Serve LLM, 1P1D each; Sluice with one engine and vLLM's own server beside an idle Ray (75 minutes)
	$(PY) -m benchmarks.peers.real $(ARGS)

bench-gpu: setup-cuda ## Sluice beside vLLM's own server and vllm-router on one GPU of 139 GiB, an 8B model's shape with dummy weights (10 minutes; ARGS="--only one --quick")
	$(PY) -m benchmarks.peers.gpu $(ARGS)

bench-transfer: setup ## descriptors, prefix hits and posting cost of KV reads by block order, as pools grow old (FlowKV)
	$(PY) -m benchmarks.transfer $(ARGS)

bench-versus: setup ## this checkout against another one, in turn, both in pure Python: BASE=../other-checkout
	$(PY) -m benchmarks.live.versus --base $(BASE) $(ARGS)

bench-watching: setup ## live: what a dashboard, open pages and traces cost; traces under kills; a page open for 30 minutes, one beside 1,024 engines, and a walk through all views and experiments (Chromium) (95 minutes)
	$(PY) -m benchmarks.watching.cost $(ARGS)
	$(PY) -m benchmarks.watching.traced
	$(PY) -m benchmarks.watching.opened
	$(PY) -m tests.dashboard.cost
	$(PY) -m benchmarks.watching.walk

bench-mfs: setup ## KV reads unscheduled, by EDF and by MFS over one link of 400 Mbit/s, and by MFS with the shipped thresholds (root, Linux, tc; 90 minutes; ARGS="--setup sim": all stages on sim engines)
	$(PY) -m benchmarks.mfs $(ARGS)

chaos: setup ## kill, stop, slow and starve processes under load: ARGS="--minutes 10 --seeds 1 [--engines vllm] [--soak]"
	$(PY) -m benchmarks.chaos $(ARGS)

fuzz: setup ## hostile input by a seed (tests/fuzz): ARGS="--seed 2 --requests 1000000 --frames 1000000 --minutes 30"
	$(PY) -m tests.fuzz $(ARGS)

bench-overload: setup ## live: goodput and shares of four tenants at 0.8 to 20 times capacity, on sim engines beside vllm-router and the simulator, then on vLLM beside its own server (two hours; the experiments overload and fairness are the simulator alone)
	$(PY) -m benchmarks.overload $(ARGS)
	$(PY) -m benchmarks.overload --setup vllm $(ARGS)

bench-streams: setup ## live on sim engines: 10,000 streams at once (memory, CPU, gaps), and the most at 20 ms a step (9 minutes; ARGS="--streams 1000")
	$(PY) -m benchmarks.live.streams --out benchmarks/results/streams $(ARGS)

bench-capacity: setup ## live on sim engines: requests/s of one router by ingresses (1 to 4) and engines (2 to 256), two policies (20 minutes; ARGS="--quick")
	$(PY) -m benchmarks.capacity $(ARGS)

bench-hostile: setup ## live on sim engines: the streams of others beside slow readers, half-open senders, idle connections and large requests (a quarter of an hour)
	$(PY) -m benchmarks.hostile $(ARGS)

bench-recompute: setup ## live on vLLM: how long a stream pauses after its decode engine was killed, by its tokens (half an hour)
	$(PY) -m benchmarks.chaos.recompute $(ARGS)

bench-truth: setup ## the simulator against a live app by load and policy (ARGS: --engines vllm, --quick): errors of TTFT, TPOT, goodput
	$(PY) -m benchmarks.experiments.truth $(ARGS)

clean: ## remove the environment and all caches of this folder (not the converted model)
	rm -rf $(VENV) .ci/work.* build sluice/build *.egg-info sluice/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
