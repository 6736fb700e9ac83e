# `make test` and `make demo` need a Linux machine with Python 3.11 or 3.12 and nothing of ours.
# Another interpreter: `make test PYTHON=python3.11 VENV=.venv-3.11`.

# Asked rather than looked up: a name on the PATH may be a version manager's stub that cannot run,
# and some distributions ship Python without the modules that make an environment.
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
PYTHON ?= $(firstword $(foreach name,python3.12 python3.11 python3,\
	$(shell $(name) -c '$(USABLE)' >/dev/null 2>&1 && echo $(name))))
VENV ?= .venv
STAMP := $(VENV)/.installed
BIN := $(abspath $(VENV))/bin
# What is run may look for ninja, torchrun or megavis by name. It keeps what Python compiles in the
# environment, also where PYTHONDONTWRITEBYTECODE is set: compiling takes two thirds of an import.
RUN := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX="$(abspath $(VENV))/pycache" \
	PATH="$(BIN):$$PATH"

.PHONY: help install compile lint test test-cluster test-layouts demo demos docs wheel clean

help:
	@echo "make demo     train a small iGPT on letters and show what it completes (CPU, minutes)"
	@echo "              (PAPER=mp3: another paper's demo)"
	@echo "make demos    the demos of all papers, and docs/gallery.md"
	@echo "make test     format, lint, types, import direction, scripts, all tests"
	@echo "              (SELECT='not once': those that may differ between versions of packages)"
	@echo "make test-cluster  those of them alone that start a SLURM or two hosts (docs/scaling.md)"
	@echo "make test-layouts  every paper in every layout of four processes, and every pair of eight"
	@echo "              layouts; not in make test, hours (SELECT='-k mae': a part)"
	@echo "make lint     the same without the tests"
	@echo "make docs     the documents as a site, in site/, which a browser opens from the disk"
	@echo "make wheel    wheel and sdist in dist/, checked in an environment of their own (WHOLE=1: with"
	@echo "              all that they depend on, and a picture)"
	@echo "make install  only the environment, in $(VENV)"
	@echo "make clean    remove the environment and the caches"

install: $(STAMP)

# The stamp is written last: an interrupted install is done again.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 that can make environments was" \
		"found; install one, or say PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c '$(USABLE)' || { echo "make: $(PYTHON) is not Python 3.11 or 3.12 with venv and" \
		"ensurepip; say PYTHON=/path/to/another" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@# Python compiles what it imports by itself; most of the 20,000 files are never imported.
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[test]'
	@touch $@

# Done beside other work, it saves the first tests from compiling, each process for itself.
compile: $(STAMP)
	$(RUN) $(BIN)/python -c 'import megavis.training.trainer'

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# For the Python that runs it: the packages' own types are written for theirs.
	$(BIN)/mypy --python-version \
		$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	$(BIN)/lint-imports --no-logo
	$(BIN)/shellcheck --external-sources .ci/run launch/*.sh
	$(BIN)/hadolint containers/*.Dockerfile .devcontainer/Dockerfile

# Several processes run at once: threads of each would fight for the cores. Tests are shared out
# file by file, so that what a module sets up is set up once, and in this order: files of distributed
# tests take longest. Those start processes of their own, which often wait: for one another, for a
# scheduler, for the one that is still at work.
# A part of them: `make test SELECT="not once"` (markers: pyproject.toml).
SELECT ?=
SHARED := --numprocesses 2 --dist loadfile --no-loadscope-reorder
test: lint
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/pytest tests/distributed tests/unit tests/cli -m "$(SELECT)" $(SHARED)

# They skip, and say why, where Debian's packages or the rights are missing.
test-cluster: $(STAMP)
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/pytest tests/distributed -m cluster -rs

test-layouts: $(STAMP)
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/pytest tests/exhaustive -rP $(SELECT)

PAPER ?= igpt
demo: $(STAMP)
	$(RUN) bash launch/demo.sh $(PAPER)

demos: $(STAMP)
	$(RUN) bash launch/demo.sh all

# The variable silences a notice about the tool's next version.
docs: $(STAMP)
	$(RUN) NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# Tools of a release, apart from the environment of the tests.
RELEASE := $(VENV)-release
WHOLE ?=
wheel:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet build twine
	rm -rf build dist
	$(RELEASE)/bin/python -m build --outdir dist . >/dev/null
	WHOLE=$(WHOLE) bash launch/check_wheel.sh "$(abspath $(RELEASE))/bin/python"

# pyvenv.cfg tells an environment from a folder that was named by mistake.
clean:
	@for folder in $(VENV) $(RELEASE); do test ! -f $$folder/pyvenv.cfg || rm -rf $$folder; done
	rm -rf .mypy_cache .ruff_cache .import_linter_cache *.egg-info build dist site
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
