"""A pytest plugin for llama-cpp-python's tests (peer.py): replaces downloads by files, Llama by EagleLlama.

$PEER is JSON: files ({name: [model, head]}), eagle (put EagleLlama there or not), threads, report (a path to
write).
"""

import importlib.util
import json
import multiprocessing
import os
import sys
import types
from pathlib import Path

import eagle3_llama

ABOUT = json.loads(os.environ["PEER"])
RESULTS = {}
DRAFTS = []  # of every EagleLlama that something drafts for: its model, and its counters


def stand_in(name, **content):
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module


def local_file(repo_id, filename):
    return ABOUT["files"][filename][0]


def log_softmax(*_):
    raise NotImplementedError("imported by the tests, used by none")


stand_in("huggingface_hub", hf_hub_download=local_file)
if importlib.util.find_spec("scipy") is None:
    stand_in("scipy")
    stand_in("scipy.special", log_softmax=log_softmax)
multiprocessing.cpu_count = lambda: ABOUT["threads"]  # this process's share of the cores

HEADS = dict(ABOUT["files"].values())


class EagleLlamaWithHead(eagle3_llama.EagleLlama):
    """Drafts in every round, whatever that costs here."""

    def __init__(self, model_path, *args, **kwargs):
        head = HEADS.get(model_path)
        drafts = {"eagle_path": head, "n_max": 3} if head else {}
        super().__init__(model_path, *args, **drafts, **kwargs)
        if not self._delegates and (self.engine.has_head or self.engine.drafts_from_text):
            DRAFTS.append((model_path, self.stats))


if ABOUT["eagle"]:
    import llama_cpp

    llama_cpp.Llama = llama_cpp.llama.Llama = EagleLlamaWithHead


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        RESULTS[report.nodeid.partition("/")[2]] = {
            "outcome": report.outcome,
            "line": failed_line(report),
            "why": crash.message if crash else "",
        }


def failed_line(report):
    """The line of the test itself, or of a function beside it, that raised."""
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", [])
    at = [e.reprfileloc for e in entries if e.reprfileloc and e.reprfileloc.path.startswith("tests/")]
    return Path(at[-1].path).read_text().splitlines()[at[-1].lineno - 1].strip() if at else ""


def pytest_sessionfinish():
    drafted = {}
    for model, stats in DRAFTS:
        drafted[model] = drafted.get(model, 0) + stats.drafted
    Path(ABOUT["report"]).write_text(json.dumps({"drafted": drafted, "tests": RESULTS}))
