# Every target but `clean` sets up .venv first, from the files of this folder.
#
#   make PYTHON=python3.12                          another interpreter
#   make TORCH="torch --index-url URL"              another build of torch, such as one for a certain CUDA
#   make TORCH=torch==2.12.0 CONSTRAINTS=/dev/null  other versions than the pinned ones
#   make soak MINUTES=480                           state machines and fuzzers for as long

PYTHON ?= python3
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
MINUTES ?= 60

BIN := .venv/bin
INSTALLED := .venv/installed

# Otherwise each new process, of which the tests start dozens, would compile torch and transformers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-models test-all families soak sanitize check format bench clean

demo: $(INSTALLED)
	$(BIN)/titan generate "def read_lines(path" --compare --dtype float32 --speculation fixed --max-draft-tokens 4

# Two workers; threads that wait sleep, so that they leave the cores to the other worker.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test: $(INSTALLED)
	$(PYTEST)

test-fast: $(INSTALLED)
	$(PYTEST) -m "not slow"

test-models: $(INSTALLED)
	$(PYTEST) -m models

test-all: $(INSTALLED)
	$(PYTEST) -m "models or long or not models"

families: $(INSTALLED)
	PYTHONPATH=.:tests $(BIN)/python tests/models/family_table.py docs/families.md

# Round after round, with other examples each time, until one fails or the time is over, which is looked at between rounds.
soak: $(INSTALLED)
	end=$$(($$(date +%s) + 60 * $(MINUTES))); \
	while [ $$(date +%s) -lt $$end ]; do $(PYTEST) -m hypothesis --hypothesis-profile soak || exit 1; done

# AddressSanitizer and UndefinedBehaviorSanitizer over the C++ of this processor's kind, which takes g++ minutes to compile.
SANITIZED := -fsanitize=address,undefined -fno-sanitize-recover=undefined -g
sanitize: $(INSTALLED)
	CXX="g++ $(SANITIZED)" XDG_CACHE_HOME=$(CURDIR)/.sanitized PYTHONPATH=tests \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	$(BIN)/python -m pytest -p sanitized --capture=no tests/kernels tests/draft tests/verify tests/models \
	-k "cpu and not triton and not too_little_memory"

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/titan bench throughput

clean:
	rm -rf .venv build dist .sanitized .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find titan draft verify kernels bench training examples tests -name __pycache__ -prune -exec rm -r {} +

# torch comes first and alone, so that TORCH may carry options that hold for torch only. Modules are compiled when first imported: of the
# thousands that come with torch and transformers, few are.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -qq --no-compile --constraint $(CONSTRAINTS) $(TORCH)
	$(BIN)/pip install -qq --no-compile --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@
