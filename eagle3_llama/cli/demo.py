"""The demo: a real model's answers plainly, with the head, and with drafts from the text; their speeds."""

from __future__ import annotations

import contextlib
import statistics
import textwrap
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from ..bench.child import built, of_checkout
from ..bench.table import lay_out, terminal_width
from ..common.files import check_writable, replacing, write_json
from ..common.options import utf8
from ..errors import EagleError
from ..llama.chat import chat_tokens, generate, stream, style_of
from ..runtime.drafted import BOTH
from ..runtime.machine import cores

PROMPT = "Thomas is very healthy, but he has to go to the hospital every day. What could be the reasons?"
# An answer that quotes: SmolLM2 copies most of it, in every format.
QUOTE = """Repeat the following list word for word.

Opening hours:
- Monday to Thursday: from 9 in the morning to 5 in the afternoon
- Friday: from 9 in the morning to 8 in the evening
- Saturday: from 10 in the morning to 4 in the afternoon
- Sunday: closed"""
PICTURE: dict[str, Any] = {"record": True, "width": 100, "force_terminal": True, "color_system": "truecolor"}
ROUNDS = {"head": 5, "text": 3}  # pairs of timed answers


def main(
    prompt: Annotated[str, typer.Option(help="question for the model", callback=utf8)] = PROMPT,
    format: Annotated[
        str, typer.Option(help="formats of SmolLM2-135M-Instruct, comma-separated")
    ] = "BF16,Q4_0",
    n_predict: Annotated[int, typer.Option(min=1, max=1500, help="most tokens to generate per answer")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
    svg: Annotated[Path | None, typer.Option(help="write what it shows to this file, as a picture")] = None,
) -> None:
    """Generate plainly, with the head, and with drafts from the text; compare speed and text.

    A checkout that has built stock llama-cpp-python's libraries, as `bench` does, times these too.
    """
    console = Console(**PICTURE) if svg is not None else Console()
    try:
        check_writable(json_file)
        check_writable(svg)
        formats = [fmt.strip() for fmt in format.upper().split(",")]
        results = [r for fmt in formats for r in _run(console, fmt, prompt, n_predict)]
        identical = all(r["identical"] for r in results)
        out = {"identical": identical, "prompt": prompt, "n_predict": n_predict, "results": results}
        write_json(json_file, out)
    except EagleError as e:
        Console(stderr=True).print(f"error: {e}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    lines = table(results, console.width if svg is not None else terminal_width())
    console.print("\n" + "\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    for r in results:
        if r["mean_drafted"] < 0.1:
            why = "drafts are hardly ever faster on this machine, so it decodes plainly"
            console.print(f"{r['format']}, {r['drafts']}: {why}.")
    if svg is not None:
        with replacing(svg) as part:
            console.save_svg(str(part), title="./scripts/demo")
    raise typer.Exit(0 if identical else 1)


def _run(console: Console, fmt: str, prompt: str, n_predict: int) -> list[dict[str, Any]]:
    """The demo in a format: an answer with the head, and one that quotes without it, each beside plain's."""
    from ..llama.eagle_llama import EagleLlama
    from ..models import shipped_head, smollm2

    from llama_cpp import Llama

    path = str(smollm2(fmt))
    common: dict[str, Any] = {
        "n_ctx": 2048,
        "n_threads": cores(),
        "n_threads_batch": cores(),
        "flash_attn": True,
        "verbose": False,
    }
    results = []
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(contextlib.closing(Llama(path, **common)))
        stock = None
        if built("--stock"):
            sizes = common["n_threads"], common["n_ctx"], common["flash_attn"]
            stock = stack.enter_context(contextlib.closing(of_checkout("stock").StockProcess(path, *sizes)))
        with console.status(f"{fmt}: loading the model, and measuring the costs of decoding and drafting"):
            eagle = EagleLlama(path, eagle_path=str(shipped_head()), **common)
        with eagle:
            results.append(_compare(console, (plain, eagle, stock), fmt, "head", prompt, n_predict))
        with EagleLlama(path, **common) as alone:
            results.append(_compare(console, (plain, alone, stock), fmt, "text", QUOTE, n_predict))
    return results


def _compare(
    console: Console, llms: tuple[Any, Any, Any], fmt: str, drafts: str, prompt: str, n_predict: int
) -> dict[str, Any]:
    """Prints the answers of the first two, plain first. Returns the figures of the second."""
    plain, eagle, _ = llms
    tokens = chat_tokens(plain, prompt)
    if drafts == "text":
        console.rule(f"{fmt}: a prompt whose answer quotes it")
        console.print(prompt, style="dim", markup=False, highlight=False)
    console.rule(f"{fmt}: plain decoding")
    a, _ = stream(plain, tokens, n_predict, console, temp=0.0)
    what = "with the head" if drafts == "head" else "without a head: drafts from the text alone"
    names = [n for n in eagle.stats.drafted_from if drafts == "head" or n not in ("head", BOTH)]
    legend = [part for name in names for part in (" ", (name, style_of(name, console)))]
    console.rule(Text.assemble(f"{fmt}: {what}; who drafted a token:", *legend))
    eagle.stats.reset()
    b, _ = stream(eagle, tokens, n_predict, console, temp=0.0)
    result = {"format": fmt, "drafts": drafts, "identical": a == b, "tokens": len(b)}
    result.update(_measure(f"{fmt}, {drafts}", llms, tokens, n_predict, ROUNDS[drafts]))
    stats = eagle.stats
    return result | {
        "mean_drafted": round(stats.drafted / max(stats.rounds, 1), 3),
        "mean_accepted_length": round(stats.mean_accepted_length, 3),
        "accept_per_position": [round(x, 3) for x in stats.accept_per_position],
        "drafted_from": stats.drafted_from,
        "accepted_from": stats.accepted_from,
        "time_share": {k: round(v, 4) for k, v in stats.time_share.items()},
    }


def _measure(
    name: str, llms: tuple[Any, Any, Any], prompt: list[int], n_predict: int, rounds: int
) -> dict[str, float]:
    """Tokens per second of each, alternating. A ratio is the median of the rounds' ratios."""
    names = ["plain", "eagle", "stock"][: 2 + (llms[2] is not None)]
    took: list[dict[str, float]] = []
    with Progress(transient=True) as progress:
        title = f"{name}: timing {', '.join(names[1:])} and plain, alternating"
        task = progress.add_task(title, total=rounds * len(names) * n_predict)
        for i in range(rounds):
            took.append({})
            for n in names if i % 2 == 0 else names[::-1]:
                rate = _rate_of_stock if n == "stock" else _tokens_per_s
                took[-1][n] = rate(llms[["plain", "eagle", "stock"].index(n)], prompt, n_predict)
                progress.advance(task, n_predict)
    rates = {f"{n}_tok_per_s": round(statistics.median(t[n] for t in took), 2) for n in names}
    ratio = lambda of: round(statistics.median(t["eagle"] / t[of] for t in took if t[of]), 4)
    return rates | {"ratio": ratio("plain")} | ({"stock_ratio": ratio("stock")} if llms[2] else {})


def _tokens_per_s(llm: Any, prompt: list[int], n_predict: int) -> float:
    """Of an answer's tokens behind the first, so that the prompt does not count."""
    llm.reset()
    tokens = generate(llm, prompt, n_predict, temp=0.0)
    next(tokens, None)
    start = time.perf_counter()
    n = sum(1 for _ in tokens)
    return n / (time.perf_counter() - start) if n else 0.0


def _rate_of_stock(process: Any, prompt: list[int], n_predict: int) -> float:
    run = process.run(prompt, n_predict, {"temp": 0.0})
    return (len(run.tokens) - 1) / run.seconds if len(run.tokens) > 1 else 0.0


def table(results: list[dict[str, Any]], width: int) -> list[str]:
    """Lines of the figures, and what they mean."""
    titles = (
        "format",
        "drafts",
        "stock",
        "plain",
        "with",
        "ratio",
        "over stock",
        "drafted",
        "per round",
        "accepted at",
        "same text",
    )
    rows = [
        [
            r["format"],
            r["drafts"],
            f"{r['stock_tok_per_s']:.1f}" if "stock_ratio" in r else "",
            f"{r['plain_tok_per_s']:.1f}",
            f"{r['eagle_tok_per_s']:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['stock_ratio']:.2f}" if "stock_ratio" in r else "",
            f"{r['mean_drafted']:.2f}",
            f"{r['mean_accepted_length']:.2f}",
            " ".join(f"{x:.2f}" for x in r["accept_per_position"][:2]),
            "yes" if r["identical"] else "NO",
        ]
        for r in results
    ]
    legend = (
        "drafts: with the head, and the text beside it; or from the text alone, on a prompt whose answer"
        " quotes it. plain, with: tokens a second without and with drafts. drafted: draft tokens a round. per"
        " round: tokens a round, the one that the target adds by itself included. accepted at: the share of"
        " rounds whose draft token at position 1, 2, ... was accepted."
    )
    if any("stock_ratio" in r for r in results):
        legend += (
            " stock: llama-cpp-python with its own libllama, in a process of its own; its text may differ."
            " over stock: our speed with drafts, in units of it."
        )
    return [*lay_out(titles, rows, 2, width), "", *textwrap.wrap(legend, width)]


if __name__ == "__main__":
    typer.run(main)
