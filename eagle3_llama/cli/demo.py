"""The demo: one answer of a real model with plain decoding and one with the head, and their speeds."""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from ..bench.table import lay_out, terminal_width
from ..common.files import replacing
from ..errors import EagleError
from ..llama.chat import COLOURS, chat_tokens, generate, stream
from ..runtime.machine import cores

PROMPT = "Thomas is very healthy, but he has to go to the hospital every day. What could be the reasons?"
ROUNDS = 5


def main(
    prompt: Annotated[str, typer.Option(help="question for the model")] = PROMPT,
    format: Annotated[
        str, typer.Option(help="formats of SmolLM2-135M-Instruct, comma-separated")
    ] = "BF16,Q4_0",
    n_predict: Annotated[int, typer.Option(min=1, max=1500, help="most tokens to generate per answer")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Generate with and without the head, and compare speed and text."""
    console = Console()
    try:
        results = [_run(console, fmt.strip(), prompt, n_predict) for fmt in format.upper().split(",")]
        identical = all(r["identical"] for r in results)
        if json_file is not None:
            out = {"identical": identical, "prompt": prompt, "n_predict": n_predict, "results": results}
            with replacing(json_file) as part:
                part.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    except EagleError as e:
        Console(stderr=True).print(f"error: {e}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    print("\n" + "\n".join(table(results, terminal_width())))
    for r in results:
        if r["mean_drafted"] < 0.1:
            why = "drafting with this head is hardly ever faster on this machine, so it decodes plainly"
            console.print(f"{r['format']}: {why}.")
    raise typer.Exit(0 if identical else 1)


def _run(console: Console, fmt: str, prompt: str, n_predict: int) -> dict[str, Any]:
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
    with console.status(f"{fmt}: loading the model, and measuring the costs of decoding and drafting"):
        plain, eagle = Llama(path, **common), EagleLlama(path, eagle_path=str(shipped_head()), **common)
    tokens = chat_tokens(plain, prompt)

    console.rule(f"{fmt}: plain decoding")
    a, _ = stream(plain, tokens, n_predict, console, temp=0.0)
    legend = [(f" {i}", COLOURS[i]) for i in range(1, len(COLOURS))]
    console.rule(Text.assemble(f"{fmt}: with the head; accepted draft tokens coloured by position", *legend))
    eagle.stats.reset()
    b, _ = stream(eagle, tokens, n_predict, console, temp=0.0)
    result = {"format": fmt, "identical": a == b, "tokens": len(b)}
    result.update(_measure(fmt, plain, eagle, tokens, n_predict))
    stats = eagle.stats
    result.update(
        {
            "mean_drafted": round(stats.drafted / max(stats.rounds, 1), 3),
            "mean_accepted_length": round(stats.mean_accepted_length, 3),
            "accept_per_position": [round(x, 3) for x in stats.accept_per_position],
            "time_share": {k: round(v, 4) for k, v in stats.time_share.items()},
        }
    )
    plain.close()
    eagle.close()
    return result


def _measure(fmt: str, plain: Any, eagle: Any, prompt: list[int], n_predict: int) -> dict[str, float]:
    """Tokens per second of both, alternating. The ratio is the median of the pairs' ratios."""
    import time

    pairs = []
    with Progress(transient=True) as progress:
        task = progress.add_task(f"{fmt}: timing both, alternating", total=2 * ROUNDS * n_predict)
        for i in range(ROUNDS):
            rate = {}
            for llm in (plain, eagle) if i % 2 == 0 else (eagle, plain):
                llm.reset()
                tokens = generate(llm, prompt, n_predict, temp=0.0)
                next(tokens, None)  # the prompt does not count
                start = time.perf_counter()
                n = sum(1 for _ in tokens)
                rate[llm] = n / (time.perf_counter() - start) if n else 0.0
                progress.advance(task, n_predict)
            pairs.append((rate[plain], rate[eagle]))
    return {
        "plain_tok_per_s": round(statistics.median(p for p, _ in pairs), 2),
        "eagle_tok_per_s": round(statistics.median(e for _, e in pairs), 2),
        "ratio": round(statistics.median(e / p for p, e in pairs if p), 4),
    }


def table(results: list[dict[str, Any]], width: int) -> list[str]:
    """Lines of the figures, and what they mean."""
    titles = ("format", "plain", "head", "ratio", "drafted", "per round", "accepted at", "same text")
    rows = [
        [
            r["format"],
            f"{r['plain_tok_per_s']:.1f}",
            f"{r['eagle_tok_per_s']:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['mean_drafted']:.2f}",
            f"{r['mean_accepted_length']:.2f}",
            " ".join(f"{x:.2f}" for x in r["accept_per_position"][:4]),
            "yes" if r["identical"] else "NO",
        ]
        for r in results
    ]
    legend = (
        "plain, head: tokens a second without and with the head. drafted: draft tokens a round. per round:"
        " tokens a round, the one that the target adds by itself included. accepted at: the share of rounds"
        " whose draft token at position 1, 2, ... was accepted."
    )
    return [*lay_out(titles, rows, 1, width), "", *textwrap.wrap(legend, width)]


if __name__ == "__main__":
    typer.run(main)
