"""README and the pages: snippets run, commands exist, links lead somewhere, tables name their source."""

import re
import shlex
import sys

import heads
import pytest
import tiny_models
import tiny_vision
import typer
from checkpoints import write_head
from commands import run
from paths import ROOT
from tiers import each
from tiny_vision import needs_mtmd

from eagle3_llama.cli.main import app
from eagle3_llama.common.options import CONTEXT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "eagle3_llama/docs").glob("*.md")),
    *sorted((ROOT / ".github").glob("*.md")),
]
TEXT = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = typer.main.get_command(app).commands


def blocks(kind):
    """(page, code) of each fenced block."""
    return [
        (page, code)
        for page, text in TEXT.items()
        for code in re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
    ]


SNIPPETS = [
    (page, code)
    for page, code in blocks("python")
    if "base_url" not in code and "client." not in code and not page.endswith("/libraries.md")
]  # those of libraries.md are tests/llama/test_installed.py's


@pytest.mark.parametrize(
    "page, code", [(p, c) for p, c in SNIPPETS if "mmproj" not in c and "from_pretrained" not in c]
)
def test_snippets_run(page, code):
    done = run([sys.executable, "-c", code], cwd=ROOT)
    assert "accepted_prediction_tokens" in done.stdout


def test_examples_ask_for_flash_attention():
    """Its default is Llama's, which is a quarter slower."""
    call = re.compile(r"\bEagleLlama(?:\.from_pretrained)?\(.*?\)\n", re.DOTALL)
    calls = [(page, found) for page, code in blocks("python") for found in call.findall(code)]
    assert len(calls) >= 3 and not [each for each in calls if "flash_attn=True" not in each[1]]


def test_the_snippet_by_name_runs(tmp_path):
    """README's, with a small hub that has a tiny model and a head under the names that it gives."""
    pytest.importorskip("huggingface_hub")
    from converting import shared
    from hub_server import Hub

    [(page, code)] = [(page, code) for page, code in SNIPPETS if "from_pretrained" in code]
    model, pattern, head = re.search(r'"(.+?)",\s+filename="(.+?)",\s+eagle="(.+?)"', code).groups()
    target = tiny_models.target(tmp_path / "target.gguf", n_layer=12, ends=False)
    made = heads.make("AngelSlim", shared(target))
    checkpoint = write_head(tmp_path / "head", made.config, made.tensors)
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    name = pattern.replace("*", "Qwen3-4B-")
    assert page == "README.md" and "n_ctx=4096" in code
    hub = Hub({model: {name: target.read_bytes(), "other-Q8_0.gguf": b""}, head: files})
    try:
        code = code.replace("n_ctx=4096", "n_ctx=512")  # the tiny model answers until its context is full
        done = run([sys.executable, "-c", code], env=hub.env(tmp_path), cwd=tmp_path)
    finally:
        hub.close()
    assert "accepted_prediction_tokens" in done.stdout and f"converting {head} for {name}" in done.stderr


@needs_mtmd
def test_the_snippet_with_an_image_runs(tmp_path):
    """With files of the names that it gives, and an image at hand."""
    [code] = [code for _, code in SNIPPETS if "mmproj" in code]
    tiny_models.target(tmp_path / "vlm.gguf", chat_template=tiny_vision.CHAT, ends=False)
    tiny_models.head(tmp_path / "head.gguf")
    tiny_vision.projector(tmp_path / "mmproj.gguf")
    here = "file:///home/me/cat.png"
    assert here in code and "n_ctx=8192" in code
    # the tiny model answers until its context is full
    code = code.replace(here, tiny_vision.picture(1)).replace("n_ctx=8192", "n_ctx=512")
    run([sys.executable, "-c", code], cwd=tmp_path)


@pytest.mark.parametrize("pair", each(["tiny", "demo"], ["tiny"]))
def test_the_clients_snippets_run(tmp_path, pair):
    """Those of the page on the server's APIs, in order, against a server with tiny models, or the demo's."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("openai")
    from server_tools import running, settings

    from eagle3_llama.models import shipped_head, smollm2

    snippets = [code for page, code in blocks("python") if page.endswith("serve_apis.md")]
    assert len(snippets) >= 3
    if pair == "tiny":
        words = "{% for m in messages %}{{ m.content }}{% endfor %}"
        target = tiny_models.target(tmp_path / "target.gguf", chat_template=words)
        head, n_ctx = tiny_models.head(tmp_path / "head.gguf"), 1024
    else:
        target, head, n_ctx = smollm2("Q4_0"), shipped_head(), 512
    made = {"model": str(target), "eagle": str(head), "n_ctx": n_ctx, "n_parallel": 2}
    with running(settings(**made, embeddings="target")) as server:
        code = "\n".join(snippets).replace("http://127.0.0.1:8000", server.url)
        run([sys.executable, "-c", code])
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_the_searches_find_what_they_look_for():
    """A pattern that finds nothing tests nothing."""
    assert {"README.md", "eagle3_llama/docs/use.md"} <= {page for page, _ in SNIPPETS}
    assert len(list(command_lines())) > 20 and "README.md" in {page for page, _ in command_lines()}
    assert {words[1] for _, words in command_lines()} >= {
        "generate",
        "serve",
        "bench",
        "convert",
        "train",
        "info",
    }
    assert len(list(links())) > 20 and {"README.md", ".github/CONTRIBUTING.md"} <= {
        page for page, _ in links()
    }
    named = [name for page in TEXT for name in patches_named(page) + paths_named(page)]
    assert len(named) > 40


def command_lines():
    """Each `eagle3-llama ...` line of a shell block or an indented one."""
    for page, text in TEXT.items():
        shell = "\n".join(code for p, code in blocks("bash") if p == page)
        indented = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    eagle3-llama "))
        for line in f"{shell}\n{indented}".replace("\\\n", " ").splitlines():
            if line.strip().startswith("eagle3-llama "):
                yield page, shlex.split(line.removesuffix(" &"), comments=True)


@pytest.mark.parametrize("page, words", list(command_lines()))
def test_commands_exist(page, words):
    """The command line parses them: no option is made up, and no argument is missing."""
    command = COMMANDS[words[1]]
    command.make_context(words[1], words[2:], resilient_parsing=False, **CONTEXT)


def links():
    for page, text in TEXT.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not re.match(r"[a-z]+:", target):
                yield page, target


@pytest.mark.parametrize("page, target", list(links()))
def test_links_lead_somewhere(page, target):
    assert ((ROOT / page).parent / target.partition("#")[0]).exists()


@pytest.mark.parametrize("page", TEXT)
def test_files_that_are_named_exist(page):
    """Patches by number, and paths in backticks that begin with a folder of the checkout."""
    for number in patches_named(page):
        assert list((ROOT / "patches").glob(f"{number}-*.patch")), f"patches/{number}"
    for path in paths_named(page):
        assert re.fullmatch(r"patches/[\dx]{4}", path) or (ROOT / path).exists(), path


def test_files_of_a_token_and_of_a_request_exist():
    """How it works names them below eagle3_llama, and those of one sentence by their last part alone."""
    page = TEXT["eagle3_llama/docs/how-it-works.md"]
    named = re.findall(r"`((?:server|batching|llama|runtime)/[\w./]*)`", page)
    assert len(named) > 15
    for path in named:
        assert (ROOT / "eagle3_llama" / path).exists(), path


def patches_named(page):
    return re.findall(r"patches/(\d{4})", TEXT[page])


def paths_named(page):
    return re.findall(r"`((?:eagle3_llama|native|scripts|tests|patches)/[\w./-]*)`", TEXT[page])


def test_the_replicas_page(tmp_path, monkeypatch):
    """scaling.md: options of its table exist, settings of its commands and its file are read as is."""
    import inspect

    import yaml

    from eagle3_llama.server.ray import deployment

    page = TEXT["eagle3_llama/docs/scaling.md"].replace("\\\n", " ")
    rows = re.findall(r"^\| (`--.*?) \|", page, re.MULTILINE)
    table = re.findall(r"`--([\w-]+)`", "\n".join(rows))
    options = inspect.signature(deployment.serve_replicas).parameters
    assert len(table) >= 6 and {o.replace("-", "_") for o in table} <= set(options)
    commands = re.findall(r"^python -m eagle3_llama\.server\.ray (.*)$", page, re.MULTILINE)
    assert commands
    for line in commands:
        assert {o.replace("-", "_") for o in re.findall(r"--([\w-]+)", line)} <= set(options), line
    lines = re.findall(r"ray:build (\S+=.*)$", page, re.MULTILINE)
    words = [dict(w.split("=", 1) for w in line.split()) for line in lines]
    [text] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    [app] = yaml.safe_load(text)["applications"]
    assert app["import_path"] == "eagle3_llama.server.ray:build" and words
    (tmp_path / "key").write_text("k" * 32)
    here = {
        "model": str(tiny_models.target(tmp_path / "target.gguf")),
        "eagle": str(tiny_models.head(tmp_path / "head.gguf")),
        "api_key_file": str(tmp_path / "key"),
    }
    for args in (*words, app["args"]):
        settings, scale = deployment._settings({**args, **{k: v for k, v in here.items() if k in args}})
        assert (settings.threads, scale.least, scale.most) == (8, 1, 4)


def test_the_first_lines_say_whose_text_it_is():
    """And for whom it is, one figure with its model and prompts, and one command."""
    first = " ".join(TEXT["README.md"].partition("![speeds")[0].split())
    for said in ("llama_cpp.Llama", "times as fast", "SmolLM2", "prompts", "git clone", "./scripts/demo"):
        assert said in first, said
    for page in ("README.md", "eagle3_llama/docs/use.md", "eagle3_llama/docs/scope.md"):
        words = " ".join(TEXT[page].split())
        assert "exactly what this package gives without drafts" in words, page
        assert "sums in another order" in words and "as between any two builds" in words, page


def test_readme_is_short():
    assert len(TEXT["README.md"].splitlines()) < 130
