PYTHON ?= python
WORKERS ?= 2
# A test worker per core: more threads in each only fight for them (the thread-count tests set their own).
export OMP_NUM_THREADS ?= 1

.PHONY: lint test test-all test-gpu sanitize fuzz bench bench-cpu

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest -q -n $(WORKERS) -m "not slow"

test-all:
	$(PYTHON) -m pytest -q -n $(WORKERS)

# The fuzz tests of `make test`, with a hundred times as many cases; EVALENGINE_FUZZ_SEED=N takes other ones.
fuzz:
	EVALENGINE_FUZZ=$${EVALENGINE_FUZZ:-100} $(PYTHON) -m pytest -q -n $(WORKERS) tests/fuzz

# What passed goes, with GPU, versions and commit, to a file that can be committed as results/reference/gpu-tests-<gpu>.json.
test-gpu:
	$(PYTHON) -m pytest -q -n $(WORKERS) -m gpu --results results/gpu-tests.json

# NVIDIA's compute-sanitizer over the kernels, on a machine with CUDA and its tools.
sanitize:
	$(PYTHON) -m tests.kernels.sanitize -o results/reference/sanitizer.md

# Every kernel and whole forward steps beside their comparisons, then whole runs, on this machine's GPU, into
# results/reference. WORKLOADS=FOLDER adds that folder's workloads (*.jsonl.gz) to the runs.
bench:
	$(PYTHON) -m evalengine bench all
	$(PYTHON) -m evalengine bench throughput $(if $(WORKLOADS),--files $(WORKLOADS))

# What invariance costs on a CPU: the default task in both modes, one table each.
bench-cpu:
	$(PYTHON) -m evalengine -m engine.device=cpu batch_invariant=true,false limit=64 resume=never
