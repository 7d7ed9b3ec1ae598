"""scripts/measure/bench_openvino.py, with modules in OpenVINO's place that write down what they are asked."""

import importlib.util
import json
import os
import sys

import pytest
import tiny_models
from commands import run
from paths import ROOT

SCRIPT = ROOT / "scripts" / "measure" / "bench_openvino.py"
STANDS_IN = {
    "numpy": """
int64 = int
def array(rows, kind):
    return rows
""",
    "openvino": """
__version__ = "2.0"
Tensor = list
class Core:
    def get_property(self, device, name):
        return ["KV_CACHE_PRECISION"] if name == "SUPPORTED_PROPERTIES" else "u8"
""",
    "openvino_genai": """
import json, pathlib, types
__version__ = "1.0"
def say(**what):
    with pathlib.Path(__file__).with_name("log").open("a") as log:
        log.write(json.dumps(what) + "\\n")
GenerationConfig = dict
class LLMPipeline:
    def __init__(self, model, device, **settings):
        print("what a library prints")
        say(device=device, **settings)
        if "refused" in model:
            raise RuntimeError("failed at some.cpp:7:\\nno such | format\\n")
        self.settings = settings
    def generate(self, rows, config):
        [prompt], n = rows, config["max_new_tokens"]
        say(prompt=prompt, process=self.settings, config=config)
        paged = self.settings.get("ATTENTION_BACKEND") == "PA"
        each = 2 if paged else 1 + abs(config.get("num_assistant_tokens", 5) - 5)
        each += config.get("max_ngram_size", 2) - 2
        first = len(prompt) * (1 if paged else 2)
        mean = lambda value: lambda: types.SimpleNamespace(mean=value)
        times = dict(get_ttft=mean(first), get_generate_duration=mean(first + each * (n - 1)))
        return types.SimpleNamespace(tokens=[[7] * n], perf_metrics=types.SimpleNamespace(**times))
""",
}


@pytest.fixture
def empty(tmp_path):
    """An environment without packages: its folder for them."""
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"])
    [folder] = (tmp_path / "environment" / "lib").glob("python*/site-packages")
    return folder


def bench(tmp_path, *words, code=0, **env):
    env = {**os.environ, "EAGLE3_LLAMA_CACHE": str(tmp_path / "cache"), **env}
    done = run([sys.executable, SCRIPT, *words], code, env=env)
    assert "Traceback" not in done.stderr
    return done


def python(tmp_path):
    return "--python", tmp_path / "environment" / "bin" / "python"


@pytest.mark.thorough
def test_what_both_are_asked_and_the_table(tmp_path, empty):
    """OpenVINO's best settings are found, and a file that it refuses costs one row."""
    for name, text in STANDS_IN.items():
        (empty / f"{name}.py").write_text(text)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one two three four five six"\n"seven eight nine"\n')
    models = [tiny_models.target(tmp_path / name) for name in ("refused.gguf", "read.gguf")]
    words = ["--prompts", prompts, "--split", "all", "-n", "9", "-t", "1", "--rounds", "2", "--searched", "1"]
    done = bench(tmp_path, *models, *python(tmp_path), *words, "--json", tmp_path / "figures.json")

    conditions, sizes, _, *table = done.stdout.splitlines()
    assert "1 threads; eagle3-llama " in conditions
    assert conditions.endswith("openvino-genai 1.0, openvino 2.0, KV_CACHE_PRECISION u8")
    assert sizes == "prompts: 2 (all); tokens: 9; rounds: 2"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert {len(row) for row in cells} == {8}
    assert cells[2][:2] == [
        "refused.gguf",
        "not compared: OpenVINO GenAI (SDPA) cannot load it: no such / format",
    ]
    assert [row[:4] for row in cells[3:]] == [
        ["read.gguf", "plain decoding", "1000.0", "SDPA"],
        ["read.gguf", "drafts from the text", "1000.0", "num_assistant_tokens=5, max_ngram_size=2"],
        ["read.gguf", "the prompt", "1000.0", "PA"],
    ]
    assert all(float(row[4]) > 0 and float(row[5]) > 0 for row in cells[3:])
    assert [row[7] for row in cells[3:]] == ["0 of 4", "0 of 4", ""]
    assert not (tmp_path / "cache").exists()  # --python installs nothing
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report["measurement"] == "openvino" and report["conditions"] == "2 prompts, 9 tokens"
    assert [(row["format"], row["openvino"]) for row in report["data"]] == [("read", 1000.0)] * 3

    log = [json.loads(line) for line in (empty / "log").read_text().splitlines()]
    loads, answers = [x for x in log if "device" in x], [x for x in log if "prompt" in x]
    one = {"device": "CPU", "INFERENCE_NUM_THREADS": 1}
    backends = [{"ATTENTION_BACKEND": "SDPA"}, {"ATTENTION_BACKEND": "PA"}, {"prompt_lookup": True}]
    assert loads == [{**one, **kind} for kind in (backends[0], *backends)]
    assert all(x["config"]["ignore_eos"] and not x["config"]["do_sample"] for x in answers)
    assert {x["config"]["max_new_tokens"] for x in answers} == {1, 9}
    whole = {tuple(x["prompt"]) for x in answers if x["config"]["max_new_tokens"] == 9}
    assert len(whole) == 2
    alone = [tuple(x["prompt"]) for x in answers if x["config"]["max_new_tokens"] == 1]
    assert len(alone) == 8 and len(set(alone)) == 8  # none that OpenVINO may have kept


def test_a_row_from_made_up_figures():
    spec = importlib.util.spec_from_file_location("bench_openvino", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    best = {"plain decoding": ("PA", {}), "the prompt": ("SDPA", {})}
    found = {
        "plain decoding": [(10.0, 20.0, True), (20.0, 10.0, False), (40.0, 60.0, True)],
        "the prompt": [(100.0, 110.0, True)],
    }
    assert list(script.rows("m.gguf", best, found)) == [
        "| m.gguf | plain decoding | 20.0 | PA | 20.0 | 1.50 | 0.50, 2.00 | 2 of 3 |",
        "| m.gguf | the prompt | 100.0 | SDPA | 110.0 | 1.10 | 1.10, 1.10 |  |",
    ]


def test_a_missing_file(tmp_path):
    done = bench(tmp_path, tmp_path / "no.gguf", code=2)
    assert "no.gguf is missing: give the path of a GGUF file" in done.stderr and not done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_a_python_without_openvino(tmp_path, empty):
    model = tiny_models.target(tmp_path / "m.gguf")
    done = bench(tmp_path, model, *python(tmp_path), code=2)
    assert "cannot run openvino_genai (ModuleNotFoundError: No module named" in done.stderr
    assert "-m pip install openvino-genai==" in done.stderr
    done = bench(tmp_path, model, "--python", tmp_path / "nowhere", code=2)
    assert "nowhere cannot run openvino_genai ([Errno 2]" in done.stderr


@pytest.mark.thorough
def test_an_installation_that_fails_leaves_nothing(tmp_path):
    model = tiny_models.target(tmp_path / "m.gguf")
    done = bench(tmp_path, model, code=2, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert f"into {tmp_path / 'cache' / 'openvino-genai-'}" in done.stderr
    assert "could not be installed, see above: check the network" in done.stderr
    assert not list((tmp_path / "cache").iterdir())
