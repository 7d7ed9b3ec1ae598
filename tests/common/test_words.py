"""What commands and the server say of a mistake: the words of the command line, and no internals."""

import json
import logging
import sys
import warnings

import gguf
import pytest
import tiny_models
import typer
from commands import run

from eagle3_llama import EagleError, EagleLlama, EagleParams, ErrorKind, Tree
from eagle3_llama.cli.main import app
from eagle3_llama.common import tokenizers
from eagle3_llama.common.terminal import as_options, option_names
from eagle3_llama.heads.compare import Stage, compare, verdict
from eagle3_llama.runtime.params import USES, Use

NAMES = option_names(app)


@pytest.mark.parametrize(
    "said, told",
    [
        (
            "this context cannot check a tree: load the model with flash_attn=True, or leave tree out",
            "this context cannot check a tree: load the model with --flash-attn, or leave --tree out",
        ),
        ("n_max has no effect: give eagle", "--n-max has no effect: give --eagle"),
        ("no effect with n_max=0", "no effect with --n-max 0"),
        ("flash_attn=False turns it off", "--no-flash-attn turns it off"),
        ("max_tokens is 3, expected at least 256", "--max-tokens is 3, expected at least 256"),
        ("tree is 'x', expected NODES", "--tree is 'x', expected NODES"),
        # not settings
        ("no such file: /home/n_max/n_ctx.gguf", "no such file: /home/n_max/n_ctx.gguf"),
        ("mode eagle needs --eagle", "mode eagle needs --eagle"),
        ("key eagle3.n_ctx of a.gguf is missing", "key eagle3.n_ctx of a.gguf is missing"),
        ("a draft tree of depth 3", "a draft tree of depth 3"),
    ],
)  # fmt: skip
def test_settings_are_options(said, told):
    assert as_options(said, NAMES) == told == as_options(told, NAMES)


def test_every_refusal_of_a_drafting_setting():
    """No name with an underscore is left, nor a class of Python."""
    said = [
        f"{name} {why}" for uses in USES.values() for name, why in uses.items() if not isinstance(why, Use)
    ]
    for make in (
        lambda: EagleParams(tree="x"),
        lambda: EagleParams(2, n_min=3),
        lambda: EagleParams(2).check_no_head("there is no head"),
        lambda: EagleParams(tree="8x2x2").check_no_head("there is no head"),
    ):
        with pytest.raises(EagleError) as error:
            make()
        said.append(str(error.value))
    assert len(said) > 12
    for line in said:
        told = as_options(line, NAMES)
        assert "_" not in told and " Tree" not in told and told.startswith("--"), told


def test_the_commands_print_lines_of_their_own(files, tmp_path):
    """A warning of a head with other tokens, a context rounded up. No place in the source."""
    other = head_with(tmp_path / "other.gguf", "tokens")
    cli = [sys.executable, "-m", "eagle3_llama.cli"]
    words = ["--eagle", other, "-c", "64", "--max-tokens", "3", "--top-k", "1"]
    done = run([*cli, "generate", "-m", files[0], "-p", "x", "--raw", *words])
    assert f"warning: {other} was made for another tokenizer" in done.stderr and ".py" not in done.stderr
    assert "has 256 tokens, because llama.cpp rounds 64 up" in done.stderr


def test_flags_take_no_type():
    """The help of a flag names none."""
    for command in typer.main.get_command(app).commands.values():
        for option in command.params:
            if option.opts[0] != "--help" and getattr(option, "is_flag", False):
                assert option.metavar == "", (command.name, option.name)


def test_tree_is_public_and_true_is_no_shape():
    assert EagleParams(tree="60x6x10").tree == Tree(60, 6, 10)
    with pytest.raises(EagleError, match="tree=True names no shape: give one, such as tree='60x6x10'"):
        EagleParams(tree=True)


# -- a head of another tokenizer ----------------------------------------------------------------------------


def head_with(path, what):
    """A head with the same sizes, whose `what` (pre, tokens, model) is another."""
    own = tiny_models._tokenizer

    def other(w, tokens, types):
        tokens = [*tokens[:300], *("x" + t for t in tokens[300:])] if what == "tokens" else tokens
        own(w, tokens, types)
        if what == "pre":
            w.add_tokenizer_pre("other-bpe")
        if what == "none":
            w.kv_data[0].pop(gguf.Keys.Tokenizer.LIST)

    tiny_models._tokenizer = other
    try:
        return str(tiny_models.head(path))
    finally:
        tiny_models._tokenizer = own


def test_a_head_of_another_tokenizer_is_told(files, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EagleLlama(files[0], eagle=files[1], n_ctx=256, n_threads=1, verbose=False).close()
    assert tokenizers.difference(files[0], files[1]) is None
    assert tokenizers.difference(files[0], head_with(tmp_path / "none.gguf", "none")) is None  # not known
    other = head_with(tmp_path / "tokens.gguf", "tokens")
    with pytest.warns(RuntimeWarning, match="20 of its 320 tokens are not the target's 320"):
        EagleLlama(files[0], eagle=other, n_ctx=256, n_threads=1, verbose=False).close()
    own, tiny_models_pre = head_with(tmp_path / "pre.gguf", "pre"), tmp_path / "also.gguf"
    assert tokenizers.difference(files[0], own) is None  # the target names none
    head_with(tiny_models_pre, "pre")
    renamed = tiny_models_pre.read_bytes().replace(b"other-bpe", b"third-bpe")
    tiny_models_pre.write_bytes(renamed)
    said = tokenizers.difference(own, tiny_models_pre)
    assert said == "its tokenizer.ggml.pre is 'third-bpe', the target's is 'other-bpe'"


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"GGUF" + b"\xff" * 60])
def test_a_damaged_file_has_no_tokenizer(tmp_path, damage):
    (tmp_path / "bad.gguf").write_bytes(damage)
    assert tokenizers.read_tokenizer(tmp_path / "bad.gguf") == tokenizers.Tokenizer()


# -- compare ------------------------------------------------------------------------------------------------


def test_compare_gives_a_verdict(files):
    stages = compare(files[1], files[0], "some words to compare", 1)
    assert verdict(stages).startswith("the native graph agrees with the reference")
    for wrong in (0.5, float("nan")):
        assert "DIFFERS from the reference, first at g:" in verdict(
            [stages[0], Stage("g", 1, 1, wrong), *stages[2:]]
        )


# -- the server ---------------------------------------------------------------------------------------------


def test_refused_requests_are_logged_with_code_and_route(files, tmp_path):
    httpx = pytest.importorskip("httpx")
    from server_tools import running, settings

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(json.loads(record.getMessage()))
    log = logging.getLogger("eagle3_llama.server.access")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    folder = tmp_path / "slots/of/mine"
    given = settings(model=files[0], eagle=files[1], api_key="k" * 16, n_ctx=128, slot_save_path=str(folder))
    key = {"Authorization": "Bearer " + "k" * 16}
    try:
        with running(given) as server:
            for path in ("/v1/chat/completions", "/slots/3", "/nowhere"):
                assert httpx.post(server.url + path, json={}).status_code == 401
            body = {"prompt": "x", "speculative": {"tree": "60"}}
            bad = httpx.post(f"{server.url}/v1/completions", json=body, headers=key).json()["error"]
            models = httpx.get(f"{server.url}/v1/models", headers=key).json()
        with running(settings(model=files[0], eagle=None, n_ctx=128)) as server:
            assert httpx.get(f"{server.url}/slots", headers={"Origin": "http://evil.org"}).status_code == 403
            assert httpx.get(f"{server.url}/slots", headers={"Host": "evil.org"}).status_code == 403
    finally:
        log.removeHandler(handler)
    told = [(line["status"], line["route"], line["error"]) for line in lines if line["status"] in (401, 403)]
    refused = "invalid_api_key"
    assert told == [
        (401, "/v1/chat/completions", refused),
        (401, "/slots/{slot}", refused),
        (401, "other", refused),
        (403, "/slots", "origin"),
        (403, "/slots", "host"),
    ]
    assert folder.is_dir()
    assert bad["message"] == (
        "speculative.tree: expected NODESxDEPTHxWIDTH, such as 60x6x10, or false; not '60'"
    )
    assert models["data"][0]["id"] == "target"


def test_a_file_in_the_place_of_the_slots_folder(files, tmp_path):
    from eagle3_llama.server.settings import ServerSettings

    (tmp_path / "file").write_text("")
    with pytest.raises(EagleError, match="--slot-save-path .* cannot be made a folder"):
        ServerSettings(model=files[0], slot_save_path=str(tmp_path / "file/slots"))


def test_control_characters_of_files():
    """Names from files may have control characters; a path may have bytes that are no text."""
    assert str(EagleError(ErrorKind.BAD_FILE, "tensor a\x7fb\x1b[2J in \udcff")) == "tensor a?b?[2J in \udcff"
