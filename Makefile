PYTHON ?= python
# Workers of the GPU tests: one per core, at most 16. WORKERS overrides it. nproc counts OMP_NUM_THREADS, if it is set.
GPU_WORKERS := $(or $(WORKERS),$(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 8); echo $$((n < 16 ? n : 16))))
WORKERS ?= 2
# A test worker per core: more threads in each only fight for them (the thread-count tests set their own).
export OMP_NUM_THREADS ?= 1
# A thread that waits for another sleeps. By default it spins for milliseconds, which on cores that other workers use keeps
# away the thread that it waits for: a test of two threads took 49 s of processor time so, and 4 s with this.
export OMP_WAIT_POLICY ?= passive
# Bytecode is kept, whatever the environment says: tests start dozens of processes, each of which would compile the package
# anew (0.8 s), and pytest would rewrite every file of tests in every run (9 s).
export PYTHONDONTWRITEBYTECODE :=
# Each worker starts with one half of the list, in order, and takes from the other's end when it is done: what a module's
# or a folder's tests share is made once, not in every worker.
PYTEST = $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: lint test test-all test-gpu test-gpu-all sanitize fuzz bench bench-cpu

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test:
	$(PYTEST) -m "not slow" --durations 25 --durations-min 2

test-all:
	$(PYTEST)

# The fuzz tests of `make test`, with 250 times as many cases; EVALENGINE_FUZZ_SEED=N takes other ones.
fuzz:
	EVALENGINE_FUZZ=$${EVALENGINE_FUZZ:-100} $(PYTEST) tests/fuzz

# Outcomes, durations, GPU, versions and commit go to a file that can be committed as
# results/reference/gpu-tests-<gpu>.json. A copy without git needs EVALENGINE_COMMIT=$(git rev-parse HEAD).
test-gpu test-gpu-all: WORKERS = $(GPU_WORKERS)

test-gpu:
	$(PYTEST) -m "gpu and not slow" --durations 25 --durations-min 2 --results results/gpu-tests.json

test-gpu-all:
	$(PYTEST) -m gpu --durations 25 --durations-min 2 --results results/gpu-tests.json

# NVIDIA's compute-sanitizer over the kernels, on a machine with CUDA and its tools.
sanitize:
	$(PYTHON) -m tests.kernels.sanitize -o results/reference/sanitizer.md

# Every kernel and whole forward steps beside their comparisons, then whole runs, on this machine's GPU, into
# results/reference. WORKLOADS=FOLDER adds that folder's workloads (*.jsonl.gz) to the runs.
bench:
	$(PYTHON) -m benchmarks all
	$(PYTHON) -m evalengine bench throughput $(if $(WORKLOADS),--files $(WORKLOADS))

# What invariance costs on a CPU: the default task in both modes, one table each.
bench-cpu:
	$(PYTHON) -m evalengine -m engine.device=cpu batch_invariant=true,false limit=64 resume=never
