# Every command of the project. CI runs `make check` and nothing else.
# `make PYTHON=/path/to/python3.12 test` chooses the interpreter that .venv is made from.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# A candidate is tried, not only looked up: version managers leave names on PATH that do not run.
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3 python; do \
	if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then command -v "$$name"; break; fi; done)

# uv does not read pip's variable
UV_FLAGS = $(foreach place,$(PIP_FIND_LINKS),--find-links "$(place)")

# what must not break unseen; commas between, for coverage's --include
COVERAGE_GATE := src/depthmix/nn/*,src/depthmix/config/*,src/depthmix/flops.py,src/depthmix/budget.py
COVERAGE_GATE := $(COVERAGE_GATE),src/depthmix/kernels/reference.py
# the tests that are held to it: measuring coverage makes a test take nearly twice as long
CORE_TESTS := tests/nn tests/kernels tests/config tests/train/test_step.py \
	tests/infer/paths/test_plain.py tests/test_budget.py tests/test_flops.py

.DEFAULT_GOAL := help
.PHONY: help demo reproduce-smoke results results-check test check format test-hf test-gpu coverage docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## train a routed model and its dense twin at equal compute
	$(BIN)/depthmix demo

# Stopped by whatever, the same command goes on.
SMOKE := runs/reproduce-smoke
reproduce-smoke: $(STAMP) ## a small isoFLOP comparison on the CPU, and its report
	$(BIN)/depthmix sweep isoflop --size smoke --jobs 2 --device cpu --out $(SMOKE)
	$(BIN)/depthmix report $(SMOKE)
	@echo "the curves are in $(SMOKE)/report/report.html: open it in a browser"

results: $(STAMP) ## write the tables and figures of results/ from the records of runs
	$(BIN)/python benchmarks/results.py

results-check: $(STAMP) ## fail where results/ does not say what the records give
	$(BIN)/python benchmarks/results.py --check

# The compiled and the slow ones apart, because torch.compile(fullgraph=True) fails under jaxtyping's
# runtime checks, and they make what takes long take three times as long.
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal
QUICK := -m "not compile and not slow and not gpu" --jaxtyping-packages=depthmix,type_checks.check
REST := -m "(compile or slow) and not gpu"
test: $(STAMP) ## run the tests and hold the core to 95% coverage
	$(PYTEST) $(QUICK) --cov --cov-report= $(CORE_TESTS)
	$(BIN)/coverage report --include='$(COVERAGE_GATE)' --fail-under=95
	$(PYTEST) $(QUICK) $(addprefix --ignore=,$(CORE_TESTS))
	$(PYTEST) $(REST)

check: $(STAMP) ## everything CI runs: format, lint, types, import contracts, results, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --summary=none
	$(BIN)/lint-imports --no-logo
	$(MAKE) results-check
	$(MAKE) test

format: $(STAMP) ## format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Beside the environment's own release, which `make test` runs on. What it needs comes along, as its
# hub's client is another release, too.
OLDEST_HF := build/transformers-5.17.0
test-hf: $(STAMP) ## run the Hugging Face tests on the oldest transformers that is supported
	@if [ ! -f $(OLDEST_HF)/.installed ]; then rm -rf $(OLDEST_HF) && $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --target $(OLDEST_HF) 'transformers==5.17.0' && touch $(OLDEST_HF)/.installed; fi
	PYTHONPATH=$(OLDEST_HF) $(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu" \
		tests/hf tests/models $(wildcard tests/integration/test_hf_*.py)

# Runs where nothing can be installed: the environment's Python if there is one, else plain python3,
# and only the files with GPU tests, so that tools the others need may be absent. Warnings are only
# shown: that machine's torch may be another release, with warnings of its own. With pytest-xdist,
# PYTEST_ADDOPTS='-n 14 --dist worksteal' takes 3 minutes instead of 9 on 16 cores.
GPU_PYTHON ?= $(if $(wildcard $(STAMP)),$(BIN)/python,python3)
test-gpu: ## run the GPU tests (needs a CUDA device, torch and pytest; installs nothing)
	@$(GPU_PYTHON) -c 'import torch; torch.cuda.is_available() or exit("no CUDA device is visible to torch")'
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -W default -m gpu $$(grep -rl --include='test_*.py' 'mark\.gpu' tests)

coverage: $(STAMP) ## run the tests, then write the whole package's coverage to htmlcov/
	$(PYTEST) $(QUICK) --cov --cov-report=
	$(PYTEST) $(REST) --cov --cov-append --cov-report=
	$(BIN)/coverage report
	$(BIN)/coverage html

# Its tools are installed when they are first needed: nothing else uses them.
DOCS_STAMP := $(VENV)/.installed-docs
docs: $(DOCS_STAMP) ## build the documentation site into build/site; a broken link or an undocumented export fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the site is in build/site: open build/site/index.html, or serve it with '$(BIN)/python -m mkdocs serve'"

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

clean: ## remove caches and build outputs (keeps .venv and runs/)
	rm -rf build dist htmlcov .coverage .coverage.* .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment: made once, reinstalled when what it is made from changes.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c '' 2>/dev/null; then \
		if command -v uv >/dev/null; then \
			uv venv --quiet --clear --seed --python "$(or $(PYTHON),>=3.11)" $(VENV); \
		elif [ -z "$(PYTHON)" ]; then \
			echo "depthmix needs Python 3.11 or later and found none: install one, or name it with 'make PYTHON=/path/to/python3'." >&2; exit 1; \
		elif ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
			echo "depthmix needs Python 3.11 or later, and $(PYTHON) is not: name another with 'make PYTHON=/path/to/python3'." >&2; exit 1; \
		elif ! "$(PYTHON)" -m venv --clear $(VENV); then \
			rm -rf $(VENV); \
			echo "$(PYTHON) could not make a virtual environment: install its venv module (on Debian and Ubuntu: apt install python3-venv), or install uv." >&2; exit 1; \
		fi; \
	fi
	@echo "installing depthmix and its tools in $(VENV) (once; minutes where torch must be downloaded)"
	@if command -v uv >/dev/null; then \
		uv pip install --python $(BIN)/python $(UV_FLAGS) -c constraints.txt -e '.[dev]'; \
	else \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	fi
	@touch $@
