#!/usr/bin/env python3
"""Compares this package with OpenVINO GenAI on the same GGUF files.

    scripts/measure/bench_openvino.py MODEL.gguf... [--limit 6] [-n 64] [-t 2] [--rounds 3] [--python PATH]

Both get the same tokens of a prompt, decode greedily and go on for n tokens, past the end of the answer. They
alternate prompt by prompt, in processes of their own. Three things are compared: plain decoding; drafts from
the text, which are OpenVINO's prompt lookup and `EagleLlama` without a head; and decoding the prompt itself.

OpenVINO runs with its defaults for this processor and with our number of threads. Its attention backend and
the two lengths of its prompt lookup are those that were fastest on the first prompts (--searched). These
prompts are among those that are compared, which favours it.

A speed is the median of all answers, in tokens a second. A ratio is our speed in units of OpenVINO's on one
prompt in one round; the table has the median, the lowest and the highest. Texts may differ, because the two
add in another order, and OpenVINO rounds more. A file that it cannot read has a row that says why.

The first run makes a virtual environment for OpenVINO in the cache folder (300 MB). Or --python names the
Python of an environment that has openvino-genai.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_llama.bench.child import Child

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "openvino==2026.4.1")
ABOUT = """
import openvino, openvino_genai
core = openvino.Core()
print(f"openvino-genai {openvino_genai.__version__}, openvino {openvino.__version__}")
for name in "INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE":
    if name in core.get_property("CPU", "SUPPORTED_PROPERTIES"):
        value = core.get_property("CPU", name)
        print(f"{name} {getattr(value, 'to_string', value.__str__)()}")
"""
OURS, THEIRS = ("plain", "text"), ("SDPA", "PA", "lookup")  # processes of bench_openvino_child.py
Setting = tuple[str, dict[str, int]]  # a process of OpenVINO, and what is set for an answer
BACKENDS: list[Setting] = [("SDPA", {}), ("PA", {})]
LOOKUPS: list[Setting] = [
    ("lookup", {"num_assistant_tokens": n, "max_ngram_size": m}) for n in (2, 3, 5, 10) for m in (2, 3)
]
PROMPT = "the prompt"
KINDS = {  # what is compared: our process, and what OpenVINO chooses from
    "plain decoding": ("plain", BACKENDS),
    "drafts from the text": ("text", LOOKUPS),
    PROMPT: ("plain", BACKENDS),
}
Pair = tuple[float, float, bool]  # OpenVINO's speed, ours, and whether their tokens are the same
TITLES = ("file", "what", "OpenVINO", "its setting", "eagle3-llama", "ratio", "lowest, highest", "same text")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", metavar="FILE", help="default: scripts/data/prompts_*.jsonl"
    )
    parser.add_argument("--split", default="report", help="the half of the prompts; all: both")
    parser.add_argument("--limit", type=positive, default=6, help="prompts, evenly spaced")
    parser.add_argument("--searched", type=positive, default=2, help="prompts that settings are found on")
    parser.add_argument("-n", type=positive, default=64, metavar="TOKENS", help="tokens of an answer")
    parser.add_argument("-t", type=positive, default=2, metavar="THREADS")
    parser.add_argument("--rounds", type=positive, default=3, help="answers to each prompt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures too, for pages.py --add")
    parser.add_argument("--python", type=Path, metavar="PATH", help="of an environment with openvino-genai")
    given = parser.parse_args()
    if given.n < 2:
        parser.error("-n 1 decodes nothing: the first token comes from the prompt")
    for model in given.models:
        if not model.is_file():
            parser.error(f"{model} is missing: give the path of a GGUF file")
    from eagle3_llama.errors import EagleError

    try:
        compare(given)
    except (EagleError, OSError, ValueError) as e:
        parser.error(str(e))
    return 0


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return int(text)


def installed() -> Path:
    """The Python of OpenVINO's environment in the cache folder. The first call makes it."""
    from eagle3_llama.common.files import cache_dir

    version, python = PACKAGES[0].partition("==")[2], f"py{sys.version_info[0]}.{sys.version_info[1]}"
    folder = cache_dir() / f"openvino-genai-{version}-{python}"
    if folder.is_dir():
        return folder / "bin" / "python"
    print(
        f"installing {', '.join(PACKAGES)} from PyPI into {folder}: this is what we are compared with. It has"
        " an environment of its own, so that yours stays as it is. You may delete the folder at any time.",
        file=sys.stderr,
        flush=True,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as tmp:
        part = Path(tmp) / "environment"
        pip = [str(part / "bin" / "python"), "-I", "-m", "pip", "install", "--quiet", "--no-input"]
        pip += ["--disable-pip-version-check", "--only-binary=:all:", *PACKAGES]
        for command in ([sys.executable, "-m", "venv", str(part)], pip):
            if subprocess.run(command, stdout=sys.stderr).returncode:
                raise ValueError(
                    "OpenVINO GenAI could not be installed, see above: check the network and pip's index"
                    " settings, or name a Python that has it with --python"
                )
        os.rename(part, folder)
    return folder / "bin" / "python"


def about(python: Path) -> str:
    """OpenVINO's versions, and its defaults on this processor. Raises ValueError if `python` lacks it."""
    try:
        done = subprocess.run([python, "-I", "-c", ABOUT], capture_output=True, text=True)
        if not done.returncode:
            return ", ".join(done.stdout.splitlines())
        said = done.stderr
    except OSError as e:
        said = str(e)
    raise ValueError(
        f"{python} cannot run openvino_genai ({(said.strip().splitlines() or ['it does not say why'])[-1]}):"
        f" install it with {python} -m pip install {' '.join(PACKAGES)}, or leave out --python"
    )


def compare(given: argparse.Namespace) -> None:
    """Prints the conditions, then the rows of each file."""
    import eagle3_llama
    from eagle3_llama.bench.child import Crash
    from eagle3_llama.bench.prompts import read_prompts
    from eagle3_llama.bench.run import spaced
    from eagle3_llama.runtime import machine

    files = given.prompts or sorted((ROOT / "scripts" / "data").glob("prompts_*.jsonl"))
    prompts = spaced(read_prompts(files, split=None if given.split == "all" else given.split), given.limit)
    categories = ", ".join(dict.fromkeys(category for category, _ in prompts))
    python = given.python or installed()
    print(f"{machine.model()}, {given.t} threads; eagle3-llama {eagle3_llama.__version__}, {about(python)}")
    print(f"prompts: {len(prompts)} ({categories}); tokens: {given.n}; rounds: {given.rounds}\n")
    print(line(TITLES), line(["---"] * len(TITLES)), sep="\n", flush=True)
    data: list[dict[str, object]] = []
    for model in given.models:
        try:
            with contextlib.ExitStack() as stack:
                settings = {"model": str(model), "n_threads": given.t}
                processes = start(THEIRS, [python, "-I"], settings, stack)
                ids = tokens_of(model, [prompt for _, prompt in prompts])
                settings["n_ctx"] = max(map(len, ids)) + given.n + 64  # drafts need room too
                processes |= start(OURS, [sys.executable], settings, stack)
                best, found = measure(given, processes, ids, model.name)
            print("\n".join(rows(model.name, best, found)), flush=True)
            data += figures(model.stem.rpartition("-")[2], found)
        except Crash as e:
            why = str(e).replace("|", "/")
            print(line([model.name, f"not compared: {why}", *[""] * (len(TITLES) - 2)]), flush=True)
    if given.json is not None:
        report = {
            "measurement": "openvino",
            "command": shlex.join(sys.argv),
            "n_threads": given.t,
            "conditions": f"{len(prompts)} prompts, {given.n} tokens",
            "data": data,
        }
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def figures(name: str, found: dict[str, list[Pair]]) -> Iterator[dict[str, object]]:
    """What was compared: tokens a second of both, ours in units of OpenVINO's, the least and the most."""
    for what, pairs in found.items():
        ratios = [b / a for a, b, _ in pairs]
        theirs, mine = (round(statistics.median(pair[k] for pair in pairs), 1) for k in (0, 1))
        yield {
            "format": name,
            "what": what,
            "openvino": theirs,
            "ours": mine,
            "ratio": round(statistics.median(ratios), 2),
            "least": round(min(ratios), 2),
            "most": round(max(ratios), 2),
        }


class Process:
    """A bench_openvino_child.py. Raises Crash if it cannot go on."""

    def __init__(self, name: str, child: Child) -> None:
        self._name, self._child, self._cannot = name, child, "cannot load it"
        self._hear(child.read)
        self._cannot = "failed"

    def answer(self, prompt: list[int], n: int, setting: dict[str, int]) -> tuple[list[int], float, float]:
        """Its tokens, the seconds to the first of them, and from there to the last."""
        tokens, first, rest = self._hear(lambda: self._child.ask(json.dumps([prompt, n, setting])))
        return tokens, first, rest

    def _hear(self, read: Callable[[], str]) -> Any:
        from eagle3_llama.bench.child import Crash

        try:
            text = read()
            said = json.loads(text) if text else {"error": self._child.last_words()}
        except Crash as e:
            said = {"error": str(e)}
        if "error" in said:
            who = "eagle3-llama" if self._name in OURS else "OpenVINO GenAI"
            raise Crash(f"{who} ({self._name}) {self._cannot}: {said['error']}")
        return said["said"]


def start(
    names: Sequence[str], python: list[object], settings: dict[str, Any], stack: contextlib.ExitStack
) -> dict[str, Process]:
    from eagle3_llama.bench.child import Child

    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    script, out = Path(__file__).with_name("bench_openvino_child.py"), {}
    for name in names:
        child = Child([*python, script, json.dumps({**settings, "process": name})], env)
        stack.callback(child.close)
        out[name] = Process(name, child)
    return out


def tokens_of(model: Path, prompts: Sequence[Any]) -> list[list[int]]:
    from eagle3_llama.llama.chat import chat_tokens
    from eagle3_llama.llama.flash import FlashLlama

    with contextlib.redirect_stderr(io.StringIO()):  # it warns that a vocabulary alone has no context
        llm = FlashLlama(str(model), vocab_only=True, verbose=False)
    return [chat_tokens(llm, prompt) for prompt in prompts]


def measure(
    given: argparse.Namespace, processes: dict[str, Process], ids: list[list[int]], name: str
) -> tuple[dict[str, Setting], dict[str, list[Pair]]]:
    """OpenVINO's best setting, and the pairs of speeds, by what is compared."""
    turns = itertools.count(1)

    def run(what: str, setting: Setting, prompt: list[int]) -> tuple[float, list[int]]:
        process = processes[setting[0]]
        if what != PROMPT:
            tokens, _, seconds = process.answer(prompt, given.n, setting[1])
            return (len(tokens) - 1) / seconds, tokens
        at = next(turns) % len(prompt)  # OpenVINO keeps what it decoded: no prompt begins as one before
        return len(prompt) / process.answer(prompt[at:] + prompt[:at], 1, setting[1])[1], []

    best, found = {}, {what: list[Pair]() for what in KINDS}
    for what, (ours, settings) in KINDS.items():
        print(f"{name}: looking for the best setting of {what}", file=sys.stderr, flush=True)
        for setting in ((ours, {}), *settings):
            run(what, setting, ids[0])  # the first one is slow
        taken = [sum(1 / run(what, s, prompt)[0] for prompt in ids[: given.searched]) for s in settings]
        best[what] = settings[taken.index(min(taken))]
    for turn in range(given.rounds * len(ids)):
        print(f"{name}: turn {turn + 1} of {given.rounds * len(ids)}", file=sys.stderr, flush=True)
        order, prompt = (-1 if turn % 2 else 1), ids[turn % len(ids)]
        for what, (ours, _) in KINDS.items():
            both: list[Setting] = [best[what], (ours, {})]
            (a, theirs), (b, mine) = [run(what, setting, prompt) for setting in both[::order]][::order]
            found[what].append((a, b, theirs == mine))
    return best, found


def rows(name: str, best: dict[str, Setting], found: dict[str, list[Pair]]) -> Iterator[str]:
    for what, pairs in found.items():
        (process, setting), ratios = best[what], [b / a for a, b, _ in pairs]
        yield line(
            [
                name,
                what,
                f"{statistics.median(a for a, _, _ in pairs):.1f}",
                ", ".join(f"{key}={value}" for key, value in setting.items()) or process,
                f"{statistics.median(b for _, b, _ in pairs):.1f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f}, {max(ratios):.2f}",
                "" if what == PROMPT else f"{sum(same for _, _, same in pairs)} of {len(pairs)}",
            ]
        )


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
