"""Every command and option: help for each, the same names and defaults everywhere."""

import importlib
import inspect
import os
import re
import sys

import pytest
import typer
from commands import run
from tiers import each
from typer.testing import CliRunner

from eagle3_llama import EagleError, ErrorKind, __version__
from eagle3_llama.batching import BatchSettings
from eagle3_llama.bench.run import BenchSettings
from eagle3_llama.cli.answer_options import AnswerOptions
from eagle3_llama.cli.main import app
from eagle3_llama.common.options import CONTEXT
from eagle3_llama.common.synonyms import ANSWERED, TAKEN
from eagle3_llama.server.settings import ServerSettings

COMMANDS = typer.main.get_command(app).commands


def options(command):
    return [p for p in command.params if p.param_type_name == "option"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_for_everything(name):
    command = COMMANDS[name]
    assert command.help
    for p in command.params:
        assert p.help, f"{name} {p.opts} has no help"


def test_help_of_the_programs_beside():
    for module, call in (("eagle3_llama.server.ray", "serve_replicas"), ("eagle3_llama.cli.demo", "main")):
        made = typer.Typer()
        made.command(context_settings={})(getattr(importlib.import_module(module), call))
        for p in options(typer.main.get_command(made)):
            assert p.help, f"{module} {p.opts} has no help"


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_help_has_each_name_whole(name, asked):
    """On a terminal of 80 columns; two options were shown as --chat-templa... there."""
    said = CliRunner().invoke(app, [name, asked], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    words = set(re.findall(r"(?<![\w-])-[\w-]+", said))
    assert max(map(len, said.splitlines())) <= 80
    for p in options(COMMANDS[name]):
        assert {*p.opts, *p.secondary_opts} <= words, p.name


def parsed(command, *args):
    return COMMANDS[command].make_context(command, list(args), **CONTEXT).params


@pytest.mark.parametrize("theirs", TAKEN)
def test_names_of_other_programs(theirs):
    """In each command that has our option and not theirs. What is no name of an option stays as it is."""
    ours = TAKEN[theirs]
    having = {
        name: command
        for name, command in COMMANDS.items()
        if ours in {o for p in options(command) for o in p.opts if not p.is_flag}
        and theirs not in {o for p in options(command) for o in p.opts}
        and not (theirs == "--ctx-size" and name == "serve")
    }
    assert having
    needed = {"generate": ["-p", theirs], "train": ["--out", "x"]}
    value = {"--n-ctx": "64", "--p-min": "1", "--model-alias": theirs}.get(ours, "3")
    for name in having:
        if name == "demo":
            continue
        [param] = [p.name for p in options(COMMANDS[name]) if ours in p.opts]
        found = parsed(name, "-m", "x", *needed.get(name, ()), theirs, value)
        assert str(found[param]) in (value, f"{value}.0")
        if name == "generate":
            assert found["prompt"] == theirs
        if theirs.startswith("--"):
            assert parsed(name, "-m", "x", *needed.get(name, ()), f"{theirs}={value}")[param] == found[param]


@pytest.mark.parametrize(
    "args, said",
    [
        (["serve", "x", "-hf", "a/b"], "there is no -hf here: write --model hf:OWNER/REPO"),
        (["serve", "x", "--ctx_size", "9"], "there is no --ctx-size here: write --n-ctx, the context of one"),
        (["train", "x", "--out", "y", "-md", "z"], "there is no -md here: write --eagle FILE"),
        (["chat", "x", "-fa", "on"], "write --flash-attn or --no-flash-attn"),
        (["serve", "x", "y.gguf"], "'y.gguf' is one argument too many"),
        (["serve", "-m", "x", "y.gguf"], "'y.gguf' is one argument too many"),
        (["generate", "x", "-p", "why", "is", "it"], "'it' is one argument too many: a head is --eagle FILE"),
    ],
)
def test_names_that_are_answered(args, said):
    with pytest.raises(EagleError) as e:
        parsed(*args)
    assert said in str(e.value) and e.value.kind is ErrorKind.BAD_ARGUMENT


def test_each_answer_names_an_option_that_there_is():
    known = {o for command in COMMANDS.values() for p in command.params for o in (*p.opts, *p.secondary_opts)}
    for answer in ANSWERED.values():
        assert set(re.findall(r"--[\w-]+", answer)) <= known
    assert set(TAKEN.values()) <= known


def test_a_model_without_an_option():
    assert str(parsed("serve", "x.gguf", "--port", "1")["model"]) == "x.gguf"
    assert str(parsed("chat", "--no-text", "x.gguf")["model"]) == "x.gguf"
    assert list(map(str, parsed("bench", "a", "-m", "b", "--rounds", "2")["model"])) == ["a", "b"]
    done = CliRunner().invoke(app, ["serve", "--help"])
    assert "serve [OPTIONS] [MODEL]" in done.output
    assert str(parsed("compare", "head.gguf", "-m", "x.gguf")["head"]) == "head.gguf"


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in ("info", "demo")])
def test_target_and_head_have_one_name(name):
    """--model and --eagle, and what they were called: the same option. The demo brings its own model."""
    command = COMMANDS[name]
    by_name = {o: p for p in options(command) for o in p.opts}
    assert by_name["--model"] is by_name["-m"]
    for args in (["--target", "x"], ["--model", "x"], ["-m", "x"]):
        parsed, _, _ = command.make_parser(context(command)).parse_args(args)
        assert parsed["model"] in ("x", ["x"])
    if "eagle" in {p.name for p in command.params}:
        for args in (["--head", "x"], ["--eagle", "x"], ["--eagle-path", "x"]):
            parsed, _, _ = command.make_parser(context(command)).parse_args(args)
            assert parsed["eagle"] in ("x", ["x"])


def context(command):
    return typer.Context(command, **CONTEXT)


def test_completion_of_an_option(tmp_path):
    env = {
        **os.environ,
        "COMP_WORDS": "eagle3-llama generate --no-fl",
        "COMP_CWORD": "2",
        "_EAGLE3_LLAMA_COMPLETE": "complete_bash",
    }
    code = "import sys; sys.argv = ['eagle3-llama']; from eagle3_llama.cli.main import main; main()"
    assert run([sys.executable, "-c", code], env=env).stdout.strip() == "--no-flash-attn"


def test_the_same_defaults_everywhere():
    for name in (
        "n_ctx",
        "flash_attn",
        "n_gpu_layers",
        "threads",
        "n_max",
        "n_min",
        "p_min",
        "tree",
        "top_p",
        "seed",
    ):
        values = {
            (c, p.default)
            for c, command in COMMANDS.items()
            for p in command.params
            if p.name == name
            and c != "train"
            and (c, name) != ("serve", "seed")  # there it is each request's
        }
        assert len({v for _, v in values}) == 1 and values, (name, values)
    generate = {p.name: p.default for p in COMMANDS["generate"].params}
    for settings, names in (
        (ServerSettings, ("n_ctx", "flash_attn", "n_gpu_layers", "threads")),
        (BatchSettings, ("n_ctx", "flash_attn", "n_gpu_layers")),
        (BenchSettings, ("n_ctx", "flash_attn")),
    ):
        fields = inspect.signature(settings).parameters
        assert {n: fields[n].default for n in names} == {n: generate[n] for n in names}


def test_generate_and_chat_share_their_options():
    """They are written once, and each command has all of them, with one default and one help."""
    shared = inspect.signature(AnswerOptions).parameters
    generate, chat = ({p.name: p for p in COMMANDS[name].params} for name in ("generate", "chat"))
    assert {"model", "eagle", "temp", "n_ctx"} <= shared.keys()
    assert shared.keys() == generate.keys() & chat.keys() - {"n_predict"}
    for name in shared:
        assert generate[name].help == chat[name].help and generate[name].default == chat[name].default
    assert generate.keys() - chat.keys() == {"prompt", "raw"} and chat.keys() - generate.keys() == {"system"}


def test_version_and_completion():
    assert (
        run([sys.executable, "-m", "eagle3_llama.cli", "--version"]).stdout.strip()
        == f"eagle3-llama {__version__}"
    )
    assert {"--install-completion", "--show-completion"} <= {
        o for p in typer.main.get_command(app).params for o in p.opts
    }


TYPED = [
    ["serve", "--target", "none.gguf", "--n_parallel", "2", "--n_threads", "2"],
    ["bench", "--model", "none.gguf", "--head", "none.gguf", "--prompts", "none.jsonl"],
    ["generate", "--target", "none.gguf", "--prompt", "x"],
    ["compare", "none-head.gguf", "-m", "none.gguf"],
    ["train", "--model", "none.gguf", "--out", "none"],
]


@pytest.mark.parametrize("args", each(TYPED, TYPED[:2]))
def test_names_as_they_are_typed(args, tmp_path):
    done = run([sys.executable, "-m", "eagle3_llama.cli", *args], code=2, cwd=tmp_path)
    assert done.stderr.startswith("error: ") and "none" in done.stderr and done.stderr.count("\n") == 1


def test_a_tree_without_flash_attention(files):
    done = run(
        [
            sys.executable,
            "-m",
            "eagle3_llama.cli",
            "generate",
            "-m",
            files[0],
            "--eagle",
            files[1],
            "-p",
            "x",
            "--tree",
            "8x3x3",
            "--no-flash-attn",
        ],
        code=2,
    )
    assert "--flash-attn" in done.stderr
