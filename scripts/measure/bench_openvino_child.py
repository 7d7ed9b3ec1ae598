"""The processes of bench_openvino.py: this package's, or OpenVINO GenAI's, in an environment of its own.

    bench_openvino_child.py SETTINGS    model: a path, process: a key of RUNS, n_threads, n_ctx

It says {"said": null} when it is ready, then reads requests and answers each, a line of JSON each. A request
is [prompt tokens, tokens to generate, OpenVINO's settings for it]. An answer is {"said": [tokens, seconds to
the first of them, seconds from there to the last]}. What fails is answered with {"error": ...}.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[list[int], int, dict[str, int]], tuple[list[int], float, float]]


def openvino(settings: dict[str, Any], **kind: object) -> Run:
    import numpy
    import openvino
    import openvino_genai

    threads = {"INFERENCE_NUM_THREADS": settings["n_threads"]}
    pipeline = openvino_genai.LLMPipeline(settings["model"], "CPU", **threads, **kind)

    def run(prompt: list[int], n: int, setting: dict[str, int]) -> tuple[list[int], float, float]:
        greedy = {"max_new_tokens": n, "ignore_eos": True, "do_sample": False}
        config = openvino_genai.GenerationConfig(**greedy, **setting)
        done = pipeline.generate(openvino.Tensor(numpy.array([prompt], numpy.int64)), config)
        times = done.perf_metrics  # in milliseconds
        first = times.get_ttft().mean / 1000
        return list(done.tokens[0]), first, times.get_generate_duration().mean / 1000 - first

    return run


def ours(settings: dict[str, Any], mode: str) -> Run:
    """mode: of `eagle3-llama bench`."""
    from eagle3_llama.bench.modes import KINDS
    from eagle3_llama.bench.target import Loading

    loading = Loading(settings["model"], settings["n_threads"], settings["n_ctx"], flash_attn=True)
    llm = KINDS[mode](mode).load(loading)

    def run(prompt: list[int], n: int, setting: dict[str, int]) -> tuple[list[int], float, float]:
        llm.reset()
        tokens, begin, first = list[int](), time.perf_counter(), 0.0
        with contextlib.closing(llm.generate(prompt, temp=0.0)) as generated:
            for token in itertools.islice(generated, n):
                first = first or time.perf_counter() - begin
                tokens.append(token)
            return tokens, first, time.perf_counter() - begin - first

    return run


RUNS: dict[str, Callable[[dict[str, Any]], Run]] = {
    "SDPA": functools.partial(openvino, ATTENTION_BACKEND="SDPA"),
    "PA": functools.partial(openvino, ATTENTION_BACKEND="PA"),
    "lookup": functools.partial(openvino, prompt_lookup=True),  # on PA, which it needs
    "plain": functools.partial(ours, mode="plain"),
    "text": functools.partial(ours, mode="text"),
}


def main() -> None:
    # what a library prints goes to the log, not between the answers
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        settings = json.loads(sys.argv[1])
        run = RUNS[settings["process"]](settings)
        print(json.dumps({"said": None}), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps({"said": run(*json.loads(line))}), file=out, flush=True)
    except Exception as e:  # OpenVINO's are long, and the reason comes last
        reason = (str(e).strip().splitlines() or [type(e).__name__])[-1].strip()
        print(json.dumps({"error": reason}), file=out, flush=True)


if __name__ == "__main__":
    main()
