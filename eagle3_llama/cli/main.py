"""`eagle3-llama`: generate, chat, serve, bench, info, compare, convert, train."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from .. import __version__
from ..bench import plot as plots
from ..bench.modes import default_modes, parse_modes
from ..bench.run import BenchSettings, run_bench
from ..common import model_names
from ..common.files import check_writable, write_json
from ..common.model_files import check_models
from ..common.options import (
    APP,
    CONTEXT,
    FromText,
    Model,
    NMax,
    NMin,
    NPredict,
    PMin,
    Prompt,
    SystemMessage,
    Temp,
    Threads,
    TopP,
    TreeShape,
    utf8,
)
from ..common.settings import option, with_options
from ..common.synonyms import Command
from ..common.terminal import run
from ..errors import EagleError, ErrorKind
from ..heads.convert.cli import convert, one_line
from ..runtime.machine import cores
from ..runtime.params import EagleParams
from ..server.cli import serve
from ..train.cli import train
from .answer_options import AnswerOptions
from .demo import main as demo

app = typer.Typer(no_args_is_help=True, context_settings=CONTEXT, **APP)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"eagle3-llama {__version__}")
        raise typer.Exit


@app.callback()
def eagle3_llama(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """EAGLE speculative decoding for llama.cpp: same seed, same text as without drafts."""


@app.command(cls=Command)
@with_options(AnswerOptions)
def generate(
    prompt: Prompt,
    n_predict: NPredict = 256,
    raw: Annotated[bool, option("do not use the chat template", metavar="")] = False,
    **given: Any,
) -> None:
    """Generate one answer. Accepted draft tokens are coloured by who drafted them: head, text or both."""
    from ..llama.chat import chat_tokens
    from .conversation import answer

    options = AnswerOptions(**given)
    llm = options.load()
    tokens = llm.tokenize(prompt.encode()) if raw else chat_tokens(llm, prompt)
    if len(tokens) >= llm.n_ctx():
        raise EagleError(
            ErrorKind.BAD_ARGUMENT,
            f"the prompt has {len(tokens)} tokens, but the context has {llm.n_ctx()}: raise --n-ctx",
        )
    answer(llm, tokens, n_predict, Console(highlight=False), **options.sampling)


@app.command(cls=Command)
@with_options(AnswerOptions)
def chat(n_predict: NPredict = 512, system: SystemMessage = None, **given: Any) -> None:
    """Chat in the terminal. An empty line or Ctrl-D ends the chat. Ctrl-C stops an answer."""
    from .conversation import converse

    options = AnswerOptions(**given)
    llm = options.load()
    converse(llm, n_predict, system, Console(highlight=False), **options.sampling)


@app.command(cls=Command)
@with_options(BenchSettings, before=0)
def bench(
    model: Annotated[
        list[Path], option("target model, GGUF or hf: name; repeatable", "--model", "-m", show_default=False)
    ],
    eagle: Annotated[
        list[Path] | None, "EAGLE head: GGUF, hf: name or auto; repeat it to compare several"
    ] = None,
    draft_model: Annotated[Path | None, "small model for mode draft_model, GGUF or hf: name"] = None,
    modes: Annotated[
        str | None,
        "decoding modes: plain; eagle (head and text), head, text; prompt_lookup; stock and"
        " stock_prompt_lookup[:N], llama-cpp-python without this package; upstream[:SPEC], llama.cpp's"
        " drafters, such as upstream:ngram-mod or upstream:draft-eagle3+ngram-mod; draft_model; default:"
        " plain,eagle, and without a head plain,text, in a checkout plain,text,stock",
    ] = None,
    n_max: NMax = None,
    n_min: NMin = 0,
    p_min: PMin = 0.0,
    tree: TreeShape = None,
    text: FromText = True,
    fixed: Annotated[str, "further --n-max or --tree settings for mode eagle, such as 1,2,3,60x6x10"] = "",
    temp: Temp = 0.0,
    top_p: TopP = 0.95,
    threads: Threads = None,
    plot: Annotated[Path | None, "write plots of acceptance, speed and costs to this folder"] = None,
    json_file: Annotated[Path | None, option("write the figures to this file", "--json")] = None,
    **given: Any,
) -> None:
    """Compare the speed and the text of decoding modes, alternating between them for every prompt."""
    check_writable(json_file)
    plots.check(plot)
    targets, heads = model_names.several(model, eagle or ())
    small = model_names.model(draft_model) if draft_model is not None else None
    for target in (*targets, *([small] if small else ())):
        check_models(target, *(heads if target in targets else ()), or_model=True)
    split = lambda text: [x.strip() for x in text.split(",") if x.strip()]
    params = EagleParams(n_max, n_min, p_min, tree, text)
    names = default_modes(heads) if modes is None else split(modes)
    wanted = parse_modes(names, heads, small, params, split(fixed))
    sampling = {"temp": temp, "top_p": top_p}
    settings = BenchSettings(
        tuple(targets), tuple(wanted), sampling=sampling, n_threads=threads or cores(), **given
    )
    report = run_bench(settings)
    write_json(json_file, {**report, "command": shlex.join(["eagle3-llama", *sys.argv[1:]])})
    if plot is not None:
        plots.draw(report, plot)
    if not all(r["identical"] for r in report["results"] if r["kind"] in ("eagle", "head", "text")):
        raise typer.Exit(1)


@app.command(cls=Command)
def info(
    file: Annotated[
        Path | None, typer.Argument(help="GGUF of a target or a head, or its hf: name", show_default=False)
    ] = None,
    system: Annotated[
        bool, typer.Option("--system", metavar="", help="describe this machine, for a report of a fault")
    ] = False,
) -> None:
    """Describe a GGUF: sizes, captured layers, variant, the target that a head fits. Reads no weights."""
    if system == (file is not None):
        raise EagleError(ErrorKind.BAD_ARGUMENT, "give a GGUF file to describe, or --system")
    if file is None:
        from ..runtime.system import describe as describe_system

        for name, value in describe_system():  # plain lines, to be pasted
            print(f"{name}: {one_line(value, 2000)}", flush=True)
        return
    from rich.table import Table

    from ..heads.info import describe

    table = Table(show_header=False, box=None)
    for name, value in describe(model_names.file(file)):
        table.add_row(f"[bold]{name}[/bold]", escape(one_line(value)))
    Console().print(table)


@app.command(cls=Command)
@with_options()
def compare(
    head: Annotated[Path, typer.Argument(help="GGUF of the head, or its hf: name", show_default=False)],
    model: Model,
    prompt: Annotated[
        str, option("text to compute both for", "--prompt", "-p", callback=utf8)
    ] = "The capital of France is Paris, and the capital of Italy is",
    threads: Threads = None,
) -> None:
    """Compare the native head with a NumPy reference, stage by stage. Useful for adding a new variant.

    The last line is the verdict. The exit code is 1 if a stage differs by more than rounding.
    """
    from rich.table import Table

    from ..heads.compare import agrees, verdict
    from ..heads.compare import compare as run

    table = Table("stage")
    for name in ("largest error", "largest value", "cosine"):
        table.add_column(name, justify="right")
    target = model_names.model(model)
    gguf = model_names.head(head, target)
    if gguf is None:  # auto has said why
        raise typer.Exit(2)
    check_models(target, gguf)
    stages = run(gguf, target, prompt, threads or cores())
    for stage in stages:
        table.add_row(stage.name, f"{stage.error:.3g}", f"{stage.largest:.3g}", f"{stage.cosine:.8f}")
    Console().print(table)
    print(verdict(stages))
    if not all(map(agrees, stages)):
        raise typer.Exit(1)


app.command("demo")(demo)
for command in (convert, train, serve):
    app.command(cls=Command)(command)


def main() -> None:
    """Entry point. An EagleError is printed as one line, with exit code 2."""
    run(app)
