# Eagle3 Lab: `make lab` shows it, `make test` checks it. Each can be interrupted and repeated; `make help` lists the rest.
# PYTHON=/path/to/python3 names the Python to use, ARGS="..." is passed on to the app or pytest; OPEN= opens no browser.
SHELL := /bin/sh
ARGS ?=
OPEN ?= $(if $(DISPLAY)$(WAYLAND_DISPLAY),--open)
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help lab test notebooks notebooks-html setup setup-dev lock bundle clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

lab: setup ## set up what is missing and open the page (flags of app.py in ARGS)
	@exec .venv/bin/python app.py $(OPEN) $(ARGS)

test: ## set up what the tests need and run every check (ARGS="-k trace" narrows pytest)
	@sh scripts/python.sh scripts/setup.py --dev --browser
	@exec .venv/bin/python scripts/check.py $(ARGS)

notebooks: ## set up what the walkthroughs need and open them in JupyterLab (flags of `jupyter lab` in ARGS)
	@sh scripts/python.sh scripts/setup.py --dev
	@exec .venv/bin/python scripts/notebooks.py open $(if $(OPEN),,--no-browser) $(ARGS)

notebooks-html: ## run every walkthrough and write what came out to build/notebooks (ARGS="02 03" chooses)
	@sh scripts/python.sh scripts/setup.py --dev
	@exec .venv/bin/python scripts/notebooks.py run $(ARGS)

setup: ## environment and checkpoints for the app
	@sh scripts/python.sh scripts/setup.py

setup-dev: ## the same, and what tests need
	@sh scripts/python.sh scripts/setup.py --dev

lock: setup-dev ## resolve the locks in requirements/ anew from pyproject.toml
	@exec .venv/bin/python scripts/lock.py $(ARGS)

bundle: setup ## everything that a venue without a network needs, in one folder (ARGS=FOLDER)
	@exec .venv/bin/python scripts/bundle.py $(ARGS)

clean: ## remove the environment and what tools left here (checkpoints stay in their cache)
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
