"""How many threads a test's models get."""

import os

# this process's share of the available cores: more threads than cores spend most of their time waiting
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
THREADS = max(1, CORES // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
