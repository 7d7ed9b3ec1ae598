#!/usr/bin/env python3
"""Measures what a decode of n rows with all logits costs, in units of one row of stock llama.cpp.

    scripts/measure/bench_rows.py MODEL.gguf... [--rows 1,2,4,8,16] [--tokens 256,2000] [-t 2] [--rounds 5]
    scripts/measure/bench_rows.py MODEL.gguf... --prompt 512
    scripts/measure/bench_rows.py --random Q8_0,Q4_K
    scripts/measure/bench_rows.py MODEL.gguf... --amx

Three libraries alternate, each in a process of its own: stock llama.cpp, built with the flags of this
package's build (the first run builds it); this package's with EAGLE3_LLAMA_INTERLEAVE=0; and with 1. Each
figure is a median. AMX is left out of these, because stock llama.cpp fails on it with some compilers. With
--amx this package's library with upstream's AMX products is a fourth.
--random makes a model of random weights in each of these formats: of 1.7 billion, which fit no cache, or with
--shape 135M one like SmolLM2-135M (in K-quants a little wider). --prompt measures prompts of so many tokens
too, decoded in one batch for the last logits: tokens a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from eagle3_llama.bench.child import Child

NAMES = {"stock": "stock", "0": "not interleaved", "1": "interleaved", "amx": "AMX's layout"}
SCALES = {  # where the halves of a block begin
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "IQ4_NL": [0],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "BF16": [], "F16": [], "F32": [],
}  # fmt: skip


class Shape(NamedTuple):
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_kv: int  # heads of keys and values
    output: bool = False  # whether there is an output matrix beside the embedding


SHAPES = {"1.7B": Shape(2048, 8192, 24, 32, 32, output=True), "135M": Shape(576, 1536, 30, 9, 3)}
WIDE = {"135M": Shape(768, 1536, 30, 12, 4)}  # for blocks of 256 weights
N_VOCAB = 49152
TIMES = 5  # decodes in a turn; their median counts
MOST = 2048  # tokens of a prompt


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--random", type=formats, default=[], metavar="FORMAT,FORMAT,...")
    parser.add_argument("--shape", choices=SHAPES, default="1.7B", help="of --random")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16], metavar="N,N,...")
    parser.add_argument(
        "--tokens", type=numbers, default=[256, 2000], metavar="N,N,...", help="in the KV cache before"
    )
    parser.add_argument("-t", type=int, default=2, metavar="THREADS")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each library")
    parser.add_argument(
        "--prompt", type=int, default=0, metavar="TOKENS", help="at most 2,048; 0 measures none"
    )
    parser.add_argument("--amx", action="store_true", help="upstream's AMX products too, on Intel with AMX")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures too, for pages.py --add")
    parser.add_argument("--serve", choices=NAMES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.rows = sorted({1, *given.rows})
    if given.serve:
        serve(given)
        return 0
    if not 0 <= given.prompt <= MOST:
        parser.error(f"--prompt takes 0 to {MOST}")
    if not given.models and not given.random:
        parser.error("name a GGUF file, or formats with --random")
    for model in given.models:
        if not model.is_file():
            parser.error(f"{model} is missing: give the path of a GGUF file")
    from others.stock import libraries

    from eagle3_llama.runtime import machine

    if given.amx and "amx_int8" not in machine.sets():
        parser.error("--amx: this processor has no AMX")
    stock = libraries()
    print(machine.model())
    data = []
    for model in given.models:
        found = measure(given, model, stock)
        print(table(model, found, given), flush=True)
        data.append(figures(model.stem.rpartition("-")[2], found, given))
    for name in given.random:
        with tempfile.TemporaryDirectory() as tmp:
            model = Path(tmp) / f"random-{given.shape}-{name}.gguf"
            write_random(model, name, given.shape)
            found = measure(given, model, stock)
            print(table(model, found, given), flush=True)
            data.append(figures(name, found, given))
    if given.json is not None:
        given.json.write_text(json.dumps(report(given, data), indent=1) + "\n", encoding="utf-8")
    return 0


def figures(
    name: str, found: dict[tuple[str, int, int], float], given: argparse.Namespace
) -> dict[str, object]:
    """A format's rows of the interleaved library in units of stock's one row, behind the first --tokens."""
    tokens = given.tokens[0]
    unit = found["stock", tokens, 1]
    return {"format": name, "rows": {str(n): round(found["1", tokens, n] / unit, 2) for n in given.rows}}


def report(given: argparse.Namespace, data: list[dict[str, object]]) -> dict[str, object]:
    weights = f"random weights, {given.shape}" if given.random else "SmolLM2-135M-Instruct"
    return {
        "measurement": "rows",
        "command": shlex.join(sys.argv),
        "n_threads": given.t,
        "model": weights,
        "conditions": f"{given.tokens[0]} tokens in the KV cache" + (f", {weights}" if given.random else ""),
        "data": data,
    }


def numbers(text: str) -> list[int]:
    out = [int(part) for part in text.split(",")]
    if min(out) < 1:
        raise argparse.ArgumentTypeError(f"{text} has a number below 1")
    return out


def formats(text: str) -> list[str]:
    out = text.split(",")
    unknown = sorted(set(out) - set(SCALES))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(SCALES)}")
    return out


def write_random(path: Path, name: str, shape: str) -> None:
    """A llama of that shape. Any bytes are weights, if the scales are sane."""
    import gguf
    import numpy as np

    kind, rng = gguf.GGMLQuantizationType[name], np.random.default_rng(1)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    of = SHAPES[shape] if SHAPES[shape].n_embd % block == 0 else WIDE[shape]
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(8192)
    w.add_embedding_length(of.n_embd)
    w.add_feed_forward_length(of.n_ff)
    w.add_block_count(of.n_layer)
    w.add_head_count(of.n_head)
    w.add_head_count_kv(of.n_kv)
    w.add_rope_dimension_count(of.n_embd // of.n_head)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("llama")
    w.add_token_list([b"<unk>", b"<s>", b"</s>", *(b"token%d" % i for i in range(3, N_VOCAB))])
    w.add_token_scores([0.0] * N_VOCAB)
    w.add_token_types([2, 3, 3, *[1] * (N_VOCAB - 3)])

    def add(tensor: str, rows: int, columns: int) -> None:
        if block == 1:  # numbers of their own
            numbers = rng.standard_normal((rows, columns), np.float32) * np.float32(0.02)
            w.add_tensor(f"{tensor}.weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind)
            return
        data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
        for at in SCALES[name]:
            data[:, :, at : at + 2] = (0x00, 0x10)  # half precision: 0.0005
        w.add_tensor(f"{tensor}.weight", data.reshape(rows, -1), raw_dtype=kind)

    layers = [f"blk.{i}." for i in range(of.n_layer)]
    for norm in ("output_norm", *(layer + n for layer in layers for n in ("attn_norm", "ffn_norm"))):
        w.add_tensor(f"{norm}.weight", np.ones(of.n_embd, np.float32))
    add("token_embd", N_VOCAB, of.n_embd)
    if of.output:
        add("output", N_VOCAB, of.n_embd)
    for layer in layers:
        n_kv = of.n_kv * (of.n_embd // of.n_head)
        for part, rows in (
            ("attn_q", of.n_embd),
            ("attn_k", n_kv),
            ("attn_v", n_kv),
            ("attn_output", of.n_embd),
        ):
            add(layer + part, rows, of.n_embd)
        for part in ("ffn_gate", "ffn_up"):
            add(layer + part, of.n_ff, of.n_embd)
        add(f"{layer}ffn_down", of.n_embd, of.n_ff)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def measure(given: argparse.Namespace, model: Path, stock: Path) -> dict[tuple[str, int, int], float]:
    """Milliseconds by library, tokens and rows."""
    children = {name: start(given, model, name, stock) for name in names(given)}
    times: dict[tuple[str, int, int], list[float]] = {}
    total = given.rounds * len(given.tokens)
    try:
        for turn in range(total):
            tokens = given.tokens[turn // given.rounds]
            print(f"{model.name}: turn {turn + 1} of {total}", file=sys.stderr, flush=True)
            for rows in given.rows:
                for name, child in children.items():
                    times.setdefault((name, tokens, rows), []).append(ask(child, tokens, rows))
            if given.prompt and tokens == given.tokens[0]:
                for name, child in children.items():
                    found = ask(child, 0, given.prompt, "last")
                    times.setdefault((name, 0, given.prompt), []).append(found)
    finally:
        for child in children.values():
            child.close()
    return {key: statistics.median(values) for key, values in times.items()}


def names(given: argparse.Namespace) -> list[str]:
    return [name for name in NAMES if name != "amx" or given.amx]


def start(given: argparse.Namespace, model: Path, name: str, stock: Path) -> Child:
    from others.stock import environment

    from eagle3_llama.bench.child import Child

    env = environment(stock) if name == "stock" else dict(os.environ)
    if name != "stock":
        env |= {"EAGLE3_LLAMA_AMX": "1" if name == "amx" else "0"}
        env |= {"EAGLE3_LLAMA_INTERLEAVE": "1" if name == "1" else "0"}
    env.pop("OMP_WAIT_POLICY", None)
    size = ["--tokens", ",".join(map(str, given.tokens)), "--rows", ",".join(map(str, given.rows))]
    size += ["--prompt", str(given.prompt)]
    return Child([sys.executable, __file__, model, "--serve", name, "-t", given.t, *size], env)


def ask(child: Child, tokens: int, rows: int, logits: str = "all") -> float:
    line = child.ask(f"{tokens} {rows} {logits}")
    if not line:
        raise SystemExit(f"a measuring process ended: {child.last_words()}")
    return float(json.loads(line))


def serve(given: argparse.Namespace) -> None:
    """Answers lines "TOKENS ROWS LOGITS" with the milliseconds of a decode. LOGITS: all, or last."""
    if given.serve != "stock":
        import eagle3_llama  # noqa: F401  its library instead of llama_cpp's own
    from llama_cpp import Llama, llama_cpp

    n_ctx = max(max(given.tokens) + max(given.rows), given.prompt)
    n_batch = max(512, given.prompt)
    llm = Llama(
        str(given.models[0]), n_ctx=n_ctx, n_threads=given.t, n_threads_batch=given.t, flash_attn=True,
        n_batch=n_batch, n_ubatch=n_batch, logits_all=True, verbose=False,
    )  # fmt: skip
    ctx, seen = llm._ctx.ctx, 0
    text = [100 + 37 * i % (llm.n_vocab() - 200) for i in range(n_ctx)]

    def decode(rows: int, logits: str) -> float:
        batch = llama_cpp.llama_batch_init(rows, 0, 1)
        batch.n_tokens = rows
        for i in range(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = text[i], seen + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, logits == "all" or i == rows - 1
        begin = time.perf_counter()
        if llama_cpp.llama_decode(ctx, batch) != 0:
            raise SystemExit(f"a decode of {rows} rows failed")
        llama_cpp.llama_synchronize(ctx)
        seconds = time.perf_counter() - begin
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(ctx), 0, seen, -1)
        return seconds

    for line in sys.stdin:
        words = line.split()
        tokens, rows, logits = int(words[0]), int(words[1]), words[2]
        if tokens != seen:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
            llm.reset()
            if tokens:
                llm.eval(text[:tokens])
            seen = tokens
        decode(rows, logits)
        print(json.dumps(statistics.median(decode(rows, logits) for _ in range(TIMES)) * 1000), flush=True)


def table(model: Path, found: dict[tuple[str, int, int], float], given: argparse.Namespace) -> str:
    lines = [
        f"\n{model.name}, {given.t} threads",
        "| tokens before | library | ms of one row | " + " | ".join(f"{n} rows" for n in given.rows) + " |",
        "|---" * (len(given.rows) + 3) + "|",
    ]
    for tokens in given.tokens:
        unit = found["stock", tokens, given.rows[0]]
        for name in names(given):
            ratios = " | ".join(f"{found[name, tokens, n] / unit:.2f}" for n in given.rows)
            lines.append(
                f"| {tokens} | {NAMES[name]} | {found[name, tokens, given.rows[0]]:.1f} | {ratios} |"
            )
    if given.prompt:
        speeds = {NAMES[name]: 1000 * given.prompt / found[name, 0, given.prompt] for name in names(given)}
        told = ", ".join(f"{label} {speed:.0f}" for label, speed in speeds.items())
        lines.append(f"a prompt of {given.prompt} tokens, tokens/s: {told}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
