# Requires make and Python 3.11 or newer. Every target installs what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Stamps: the package with what the demo needs, and on top of it the tools of a developer.
DEMO := $(VENV)/.demo
INSTALLED := $(VENV)/.installed
SMOKE := .venv-smoke
MATRIX := .venv-matrix
# Each pytest process starts its own PostgreSQL. The tests wait more than they compute, hence 4 on 2 cores.
PARALLEL := -n 4 --dist worksteal --timeout 300

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# The steps share one directory and one machine, so `make -j` must not run them in parallel.
.NOTPARALLEL:
.PHONY: help demo recording test slow lint format typecheck unit smoke system chaos chaos-quick chaos-tests bench bench-growth bench-quick soak skill-zip skill-figures matrix clean FORCE

help: ## List the targets
	@echo "make TARGET, on any machine with Python 3.11 or newer (PYTHON=... names another):"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F '|' '{ printf "%-16s %s\n", $$1, $$2 }'

demo: $(DEMO) ## Run the demo on a temporary PostgreSQL
	@$(PY) -m howdah demo

recording: $(DEMO) ## Record the demo for the README again
	@$(PY) tools/record_demo.py

test: lint typecheck unit smoke chaos-quick ## Run the checks; `make slow` has the long ones
	@echo "make test: all checks passed."

slow: $(INSTALLED) system ## Execute every page, the skill and the demo; run the SQL tests on the system's PostgreSQL
	$(PY) -m pytest $(PARALLEL) -m "slow and not chaos"

lint: $(INSTALLED) ## Check style, formatting and layers
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(BIN)/lint-imports

format: $(INSTALLED) ## Format the code and fix what can be fixed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: $(INSTALLED) ## Check types
	$(PY) -m mypy

unit: $(INSTALLED) ## Run the tests; ARGS="-k claim" picks some, PG_BIN=DIRECTORY another PostgreSQL
	$(PY) -m pytest $(PARALLEL) -m "not slow" --durations=5 $(if $(PG_BIN),--pg-bin="$(PG_BIN)") $(ARGS)

matrix: $(DEMO) ## Run the tests on every Python and PostgreSQL of this machine; ARGS="-k claim" picks some
	$(PY) tools/matrix.py $(MATRIX) $(PARALLEL) -m "not slow" $(ARGS)

smoke: $(INSTALLED) ## Build the wheel and test it in an empty environment
	rm -rf dist $(SMOKE)
	$(PY) -m build --outdir dist . > dist.log 2>&1 || { cat dist.log; exit 1; }
	@rm -f dist.log
	$(PY) -m venv --without-pip $(SMOKE)
	$(PY) -m pip --python $(SMOKE)/bin/python install --quiet "$$(ls dist/*.whl)[all]"
	$(SMOKE)/bin/python -I tools/smoke.py
	# Execute the README with the wheel and nothing else of this repository.
	$(PY) -m pip --python $(SMOKE)/bin/python install --quiet pytest pytest-asyncio
	$(SMOKE)/bin/python -m pytest -q "tests/examples/test_pages.py::test_the_blocks_of_a_page_run_from_top_to_bottom[README.md]"
	rm -rf $(SMOKE)

system: $(INSTALLED) ## Run the SQL tests on the system's PostgreSQL, if there is one
	@directory=$$($(PY) tools/system_postgresql.py) || exit 1; \
	if [ -z "$$directory" ]; then \
	  echo "No PostgreSQL 14 or newer is installed on this system: tested on the embedded one alone."; \
	else \
	  echo "Testing on the PostgreSQL in $$directory"; \
	  $(PY) -m pytest $(PARALLEL) tests/sql --pg-bin "$$directory"; \
	fi

bench: $(INSTALLED) ## Compare with the peers, about an hour; writes docs/benchmarks.md; ARGS="--peers howdah,saq"
	$(PY) -m bench $(ARGS)

bench-growth: $(INSTALLED) ## Measure queues of millions of jobs, about 25 minutes; ARGS="--scale 0.01" takes a minute
	$(PY) -m bench.growth $(ARGS)

bench-quick: $(INSTALLED) ## Measure Howdah, PgQueuer and the ceilings, in under 3 minutes
	$(PY) -m bench --quick $(ARGS)

soak: $(INSTALLED) ## Run a mixed load for 30 minutes and judge every curve; writes docs/soak.md; ARGS="--minutes 2"
	$(PY) -m bench.soak $(ARGS)

chaos-quick: $(INSTALLED) ## Kill workers and the server for a minute and check every promise
	$(PY) tests/chaos/main.py quick $(ARGS)

chaos-tests: $(INSTALLED) ## Check that the chaos checker detects broken builds and broken servers
	$(PY) -m pytest $(PARALLEL) -m chaos $(ARGS)

chaos: $(INSTALLED) ## Inject every known fault for 22 minutes; writes docs/reliability.md
	$(PY) tests/chaos/main.py full --report docs/reliability.md $(ARGS)

skill-zip: $(INSTALLED) ## Pack the agent skill into dist/postgres-job-queue.zip
	$(PY) tools/skill_zip.py dist/postgres-job-queue.zip

skill-figures: $(INSTALLED) ## Write the measured figures into the agent skill
	$(PY) tools/skill_figures.py

clean: ## Remove what the other targets made
	rm -rf $(VENV) $(SMOKE) $(MATRIX) build dist dist.log *.egg-info src/*.egg-info
	rm -rf .bench .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp contains the path of the checkout (a copied checkout would otherwise test the code of the original)
# and the requested Python. If none is requested, a working environment is kept.
ASKED := $(if $(filter file,$(origin PYTHON)),,$(PYTHON))
STAMP := $(strip $(CURDIR) $(ASKED))
ifneq ($(strip $(shell cat $(DEMO) 2>/dev/null)),$(STAMP))
$(DEMO): FORCE
endif

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
VERSION := import sys; print(sys.version_info[:2])

$(DEMO): pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
	  echo "Howdah needs Python 3.11 or newer; $(PYTHON) says: $$($(PYTHON) --version 2>&1 | head -n 1)" >&2; \
	  echo "Name another one, as in: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
	  exit 1; }
	@echo "Setting up $(VENV) with Howdah and the embedded PostgreSQL; this happens once."
	@if $(PY) -c '$(NEW_ENOUGH)' 2>/dev/null && $(PY) -m pip --version >/dev/null 2>&1 && { [ -z '$(ASKED)' ] || \
	  [ "$$($(PY) -c '$(VERSION)')" = "$$($(PYTHON) -c '$(VERSION)')" ]; }; then :; else \
	  $(PYTHON) -m venv --clear $(VENV) || { \
	    echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; \
	    exit 1; }; \
	fi
	@$(PY) -m pip install --quiet --editable '.[embedded]'
	@printf '%s\n' '$(STAMP)' > $@

# `--group` needs pip 25.1, and the pip that a new environment starts with may be older.
$(INSTALLED): $(DEMO)
	@echo "Adding the tools for developers to $(VENV); this takes a minute, once."
	@$(PY) -m pip install --quiet 'pip>=25.1'
	@$(PY) -m pip install --quiet --editable '.[all]' --group dev
	@touch $@
