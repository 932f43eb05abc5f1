# `make generate PROMPT="a red heart"` and `make test` set up everything they need in .venv.

PROMPT = a red heart
VENV = .venv

# The first Python >= 3.11 on the path; `make PYTHON=/path/to/python test` takes another.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)

# Freed memory stays with a process: asking for it again slows down the tests of large batches.
TEST = MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=2000000000 \
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest

# The shell reads PROMPT from the environment, so that it may hold quotes.
export PROMPT
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: generate test test-lowest test-numerics test-guides test-slow demo-test exports style quality docs release clean

generate: $(VENV)/.installed
	$(VENV)/bin/arimage generate "$$PROMPT" --out outputs/

test: $(VENV)/.installed-dev
	$(TEST) -n 3 --dist worksteal

# With the lowest versions that pyproject.toml allows, in an environment of its own.
test-lowest:
	$(PYTHON) tools/lowest.py > .venv-lowest.txt
	PIP_CONSTRAINT=$(CURDIR)/.venv-lowest.txt $(MAKE) VENV=.venv-lowest test

# What rounds otherwise on other processors, with the instructions of an older one, in one order of sums and in another.
NUMERICS = tests/kernels/test_linear.py tests/kernels/test_codebook.py tests/kernels/test_probabilities.py \
	tests/tokenizers tests/pipelines/*/test_tokenizer.py tests/pipelines/llamagen/test_golden.py \
	tests/pipelines/var/test_parity.py tests/pipelines/test_upscaling.py tests/pipelines/test_any_order_golden.py

test-numerics: $(VENV)/.installed-dev
	MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=default $(TEST) -n 2 $(NUMERICS)
	OPENBLAS_CORETYPE=Zen $(TEST) -n 2 tests/kernels/test_step.py tests/kernels/test_step_modulated.py
	MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(TEST) -n 2 tests/pipelines/test_alignment.py tests/tokenizers/test_upscaler.py

# The commands and snippets of the pages, and the notebook.
test-guides: $(VENV)/.installed-dev
	$(TEST) -m slow tests/test_pages.py tests/test_package.py

# The demo in a browser, Chromium.
demo-test: $(VENV)/.installed-dev
	ARIMAGE_REQUIRE_CHROMIUM=1 $(TEST) -n 1 -m "" tests/app/demo/test_browser.py

test-slow: $(VENV)/.installed-dev
	$(TEST) -n 3 --dist worksteal -m slow --timeout 3600

# The stubs that tell editors and type checkers the lazy names of arimage and arimage.convert.
exports: $(VENV)/.installed-dev
	$(VENV)/bin/python tools/exports.py

style: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

quality: $(VENV)/.installed-dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

release: $(VENV)/.installed-release
	.ci/release $(VENV)/bin/python

clean:
	rm -rf dist site .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# pip comes last into a new environment: where it is, the environment is whole.
$(VENV)/bin/pip:
	@test -n "$(PYTHON)" || { echo "arimage needs Python 3.11 or newer: none is on the path" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The models of emoji and of icons are distributions of their own.
$(VENV)/.installed: pyproject.toml recipes/emoji/pyproject.toml recipes/icons/pyproject.toml | $(VENV)/bin/pip
	$(VENV)/bin/python -m pip install -e . -e recipes/emoji -e recipes/icons
	touch $@

$(VENV)/.installed-dev $(VENV)/.installed-docs $(VENV)/.installed-release: $(VENV)/.installed-%: pyproject.toml recipes/emoji/pyproject.toml recipes/icons/pyproject.toml | $(VENV)/bin/pip
	$(VENV)/bin/python -m pip install -e ".[$*]" -e recipes/emoji -e recipes/icons
	touch $(VENV)/.installed $@
