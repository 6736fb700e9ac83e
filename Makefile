# `make test` and `make demo` need only Linux and Python 3.11 to 3.13.
# To choose the interpreter: `make test PYTHON=python3.11 VENV=.venv-3.11`.

# Run each candidate instead of only finding it: a name on the PATH may be a version manager's stub,
# and some distributions ship Python without the modules that create environments.
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(firstword $(foreach name,python3.12 python3.11 python3.13 python3,\
	$(shell $(name) -c '$(USABLE)' >/dev/null 2>&1 && echo $(name))))
VENV ?= .venv
STAMP := $(VENV)/.installed
BIN := $(abspath $(VENV))/bin
# Programs may look for ninja, torchrun or megavis on the PATH. Compiled Python is kept in the
# environment, even if PYTHONDONTWRITEBYTECODE is set: compiling takes two thirds of an import.
RUN := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX="$(abspath $(VENV))/pycache" \
	PATH="$(BIN):$$PATH"

.PHONY: help install compile lint test test-cluster test-layouts demo demos comparison results docs cards \
	wheel clean

help:
	@echo "make demo     train a small iGPT on letters and show what it completes (CPU, minutes)"
	@echo "              (PAPER=mp3: another paper's demo)"
	@echo "make demos    the demos of all papers, and docs/gallery.md"
	@echo "make comparison   all papers on letters, equal in network and images, in comparison/"
	@echo "              (SMALL=1: every command, on few images; resumes)"
	@echo "make results DATA=folder   the study of docs/results.md on real data, in results/"
	@echo "              (SMALL=1: every command, on few images; resumes)"
	@echo "make test     format, lint, types, import direction, scripts, all tests"
	@echo "              (SELECT='not once': only tests that depend on package versions)"
	@echo "make test-cluster  only the tests that start SLURM or two hosts (docs/scaling.md)"
	@echo "make test-layouts  every paper in every layout of four processes, and every pair of ten"
	@echo "              layouts; takes hours, not part of make test (SELECT='-k mae': a part)"
	@echo "make lint     make test without the tests"
	@echo "make docs     the documentation as a site in site/, which needs no server"
	@echo "make cards    the demos' runs as folders with model cards, in exported/ (RUNS='runs/a runs/b':"
	@echo "              these runs)"
	@echo "make wheel    wheel and sdist in dist/, checked in a new environment (WHOLE=1: with all"
	@echo "              dependencies, and a short training)"
	@echo "make install  create the environment $(VENV)"
	@echo "make clean    remove the environment and the caches"

install: $(STAMP)

# The stamp is written last, so an interrupted installation is repeated.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 to 3.13 that can make environments was" \
		"found; install one, or say PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c '$(USABLE)' || { echo "make: $(PYTHON) is not Python 3.11 to 3.13 with venv and" \
		"ensurepip; say PYTHON=/path/to/another" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@# Python compiles modules when they are imported; most of the 20,000 files never are.
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[test]'
	@touch $@

# Run in the background, it keeps the first test processes from each compiling all modules for
# themselves, pytest's assertions in tests included.
compile: $(STAMP)
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/pytest $(TESTS) -m "$(SELECT)" --collect-only -qq >/dev/null

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# Check for the running version of Python, for which the packages' type hints are written.
	$(BIN)/mypy --python-version \
		$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	$(BIN)/lint-imports --no-logo
	$(BIN)/shellcheck --external-sources .ci/run launch/*.sh tests/check_wheel.sh
	$(BIN)/hadolint containers/*.Dockerfile .devcontainer/Dockerfile

# One thread per process, since several run at once. Tests are distributed by file, so that module
# fixtures run once, and distributed tests come first, since they take longest.
# To run a part of them: `make test SELECT="not once"` (for markers see pyproject.toml).
SELECT ?=
TESTS := tests/distributed tests/unit tests/cli
# Three processes keep two cores busy, since some tests wait for minutes. One that dies is not
# replaced: the next would run the same test and die too.
SHARED := --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
test: lint
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/pytest $(TESTS) -m "$(SELECT)" $(SHARED)

# Tests are skipped, with the reason, if Debian packages or permissions are missing.
test-cluster: $(STAMP)
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/pytest tests/distributed -m cluster -rs

test-layouts: $(STAMP)
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/pytest tests/exhaustive -rP $(SELECT)

PAPER ?= igpt
demo: $(STAMP)
	$(RUN) bash launch/demo.sh $(PAPER)

demos: $(STAMP)
	$(RUN) bash launch/demo.sh all

SMALL ?=
OUT ?= $@$(if $(SMALL),_small)
comparison: $(STAMP)
	$(RUN) $(BIN)/python -m benchmarks.comparison --out "$(OUT)" $(if $(SMALL),--small) $(OPTIONS)

DATA ?=
results: $(STAMP)
	@test -n "$(DATA)" || { echo "make: say DATA=folder, the one with CIFAR-10, MNIST, ... (docs/results.md)" \
		>&2; exit 2; }
	$(RUN) $(BIN)/python -m benchmarks.results "$(DATA)" --out "$(OUT)" $(if $(SMALL),--small) $(OPTIONS)

# The variable silences a notice about MkDocs 2.
docs: $(STAMP)
	$(RUN) NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

RUNS ?= $(wildcard runs/*_demo*)
cards: $(STAMP)
	@test -n "$(RUNS)" || { echo "make: no run to export; make demo trains one, or say" \
		"RUNS='runs/NAME ...'" >&2; exit 2; }
	$(RUN) bash -e -c 'for run in $(RUNS); do folder=exported/$${run##*/}; \
		test -e $$folder || megavis export $$run --to huggingface $$folder; done'

# Release tools have an environment of their own.
RELEASE := $(VENV)-release
WHOLE ?=
wheel:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet build twine
	rm -rf build dist
	$(RELEASE)/bin/python -m build --outdir dist . >/dev/null
	WHOLE=$(WHOLE) bash tests/check_wheel.sh "$(abspath $(RELEASE))/bin/python"

# Only folders with a pyvenv.cfg are environments; another may be named by mistake.
clean:
	@for folder in $(VENV) $(RELEASE); do test ! -f $$folder/pyvenv.cfg || rm -rf $$folder; done
	rm -rf .mypy_cache .ruff_cache .import_linter_cache *.egg-info build dist site
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
