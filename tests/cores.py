"""How many threads a test's models get."""

import os

# its process's share of the cores that it may use: of threads that outnumber them, most of the time goes into
# waiting for each other
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
THREADS = max(1, CORES // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
