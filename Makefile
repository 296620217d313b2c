# `make demo` and `make test` are all a newcomer needs: each sets up .venv first.
PYTHON ?= python3
PYTHON314 ?= python3.14t python3.14
PYTHON313 ?= python3.13
BIN := .venv/bin
INSTALL := PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-compile
# pip would compile all modules, most of which are never imported; Python compiles those that are, once.
COMPILE := $(BIN)/python -c "import jfcl.cli, matplotlib.pyplot, scipy.optimize"
# Whatever the environment says, compiled modules are kept: else each process of the tests compiles pytest and them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow lint bench peers gpu notebooks docs links wheel oldest clean

demo: .venv/package
	$(BIN)/jfcl demo --out runs/demo

# A file's tests share runs and compiled programs, so one process runs a file.
test: .venv/dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: .venv/dev
	XLA_FLAGS= $(BIN)/python -m pytest -n 2 -m "slow and not gpu"

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: .venv/dev
	$(BIN)/python benchmarks/against_peers.py
	$(BIN)/python benchmarks/models.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/federated_clustering.py
	$(BIN)/python benchmarks/cfl_round.py
	$(BIN)/python benchmarks/population.py
	$(BIN)/python benchmarks/precision.py

# Environments of the libraries that the benchmarks compare with; without them, their rows are left out.
peers:
	for name in torch fedjax byzfl pfl flower cfla; do \
	  $(PYTHON) -m venv .venv-$$name && \
	  .venv-$$name/bin/pip install --quiet -r benchmarks/peers/requirements-$$name.txt || exit 1; \
	done
	.venv-cfla/bin/pip install --quiet --no-deps CFLA==1.0.4
	python=$$(for name in $(PYTHON314) $(PYTHON313); do $$name -c "" 2> /dev/null && echo $$name && break; done); \
	if [ -z "$$python" ]; then \
	  echo "BlazeFL is left out: there is none of $(PYTHON314) $(PYTHON313) (make peers PYTHON314=PATH)"; \
	else \
	  $$python -m venv --clear .venv-blazefl && \
	  .venv-blazefl/bin/pip install --quiet -r benchmarks/peers/requirements-blazefl.txt; \
	fi

# On a machine with an NVIDIA GPU: rounds beside PyTorch (make peers) and plain JAX, in 8 minutes at most.
gpu: .venv/dev
	$(BIN)/pip install --quiet -e ".[cuda]"
	$(BIN)/python benchmarks/gpu.py

# Runs the notebooks and stores their outputs; `make test-slow` runs them on small settings and stores nothing.
notebooks: .venv/dev
	$(BIN)/python notebooks/refresh.py

# The site: docs/_build/html/index.html. A warning is an error. Notebooks of changed code are executed first.
docs: .venv/docs
	$(BIN)/python notebooks/refresh.py --stale
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build/html

# Asks every address that the site links to.
links: .venv/docs
	$(BIN)/sphinx-build -b linkcheck --quiet docs docs/_build/links

# dist/: the wheel and the source distribution, checked, and the wheel tried in an environment of its own.
wheel: .venv/bin/python
	rm -rf build dist .venv-wheel
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install --quiet dist/*.whl
	cd .venv-wheel && bin/jfcl run ifca --clients 4 --clusters 2 --rounds 2 --out run

# The environment of the tests with the oldest dependencies that pyproject.toml names; then `make test`.
oldest: .venv/dev
	$(BIN)/pip install --quiet $$($(BIN)/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  print(*[name.replace('>=', '==') for name in project['dependencies']])")

.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip

.venv/package: .venv/bin/python pyproject.toml
	$(INSTALL) -e .
	$(COMPILE)
	touch $@

.venv/dev: .venv/bin/python pyproject.toml
	$(INSTALL) -e ".[dev]"
	$(COMPILE)
	touch $@ .venv/package

.venv/docs: .venv/bin/python pyproject.toml
	$(INSTALL) -e ".[docs]"
	touch $@ .venv/package

clean:
	rm -rf .venv .venv-wheel build dist *.egg-info docs/_build
