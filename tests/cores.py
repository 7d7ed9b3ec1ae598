"""How many threads a test's models get."""

import os

# its process's share of the cores: of threads that outnumber them, most of the time goes into waiting for each other
THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
