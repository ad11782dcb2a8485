PYTHON ?= python
WORKERS ?= 2
# A test worker per core: more threads in each only fight for them (the thread-count tests set their own).
export OMP_NUM_THREADS ?= 1

.PHONY: lint test test-all test-gpu bench bench-cpu

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest -q -n $(WORKERS) -m "not slow"

test-all:
	$(PYTHON) -m pytest -q -n $(WORKERS)

# What passed goes, with GPU, versions and commit, to a file that can be committed as results/reference/gpu-tests-<gpu>.json.
test-gpu:
	$(PYTHON) -m pytest -q -n $(WORKERS) -m gpu --results results/gpu-tests.json

# Every kernel and whole forward steps beside their comparisons, on this machine's GPU, into results/reference.
bench:
	$(PYTHON) -m evalengine bench all

# What invariance costs on a CPU: the default task in both modes, one table each.
bench-cpu:
	$(PYTHON) -m evalengine -m engine.device=cpu batch_invariant=true,false limit=64 resume=never
