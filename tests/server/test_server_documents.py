"""docs/serve.md and serve_apis.md name what the server has: options, error codes, metrics, log fields."""

import ast
import json
import logging
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from paths import ROOT
from server_tools import ask, running, settings, until
from tiny_models import PROMPT

import eagle3_llama
from eagle3_llama.cli.main import app
from eagle3_llama.errors import ErrorKind
from eagle3_llama.server.anthropic import body as messages_body
from eagle3_llama.server.body import chat, completions, fields
from eagle3_llama.server.settings import BODY_PER_TOKEN, LEAST_BODY, ServerSettings

sys.path.insert(0, str(ROOT / "scripts"))
import option_tables

PACKAGE = Path(eagle3_llama.__file__).parent
PAGE = "".join((PACKAGE / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("serve_apis", "serve"))
COMMAND = typer.main.get_command(app).commands["serve"]


def rows(first):
    """The rows, each a list of cells, of the table whose header begins with `| first |`."""
    table = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [re.split(r"\s*\|\s*", line)[1:-1] for line in table[1].splitlines()]


def section(title):
    return re.search(rf"^##+ {title}\n(.*?)(?=^##+ )", PAGE, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture(scope="module")
def server(files):
    small = {"model": files[0], "eagle": files[1], "n_ctx": 256, "n_parallel": 2, "threads": 1}
    with running(settings(**small, api_key="k")) as s:
        yield s


def test_every_option_and_its_default():
    described = {
        name: default for cell, default, *_ in rows("option") for name in re.findall("`(-[^`]*)`", cell)
    }
    params = [p for p in COMMAND.params if p.param_type_name == "option" and p.name != "help"]
    for p in params:
        assert max(p.opts, key=len) in described, p.opts
    assert set(described) <= {name for p in params for name in (*p.opts, *p.secondary_opts)}
    for field, default in ((f, d.default) for f, d in ServerSettings.__dataclass_fields__.items()):
        shown = described["--" + field.replace("_", "-")]
        if isinstance(default, (int, float, str)) and not isinstance(default, bool):
            assert shown == f"{default:g}" if isinstance(default, float) else shown == str(default), field
        else:
            assert not re.fullmatch(r"[\d.]+", shown), field


def test_the_tables_of_options_are_the_settings():
    """scripts/option_tables.py writes them: names, default, range and help. A row's other sentences stay."""
    for page, text in option_tables.rendered():
        assert text == page.read_text(encoding="utf-8"), "run scripts/option_tables.py"
    [port] = [p for p in COMMAND.params if p.name == "port"]
    own = {"--port": "stale help. The line at the start names it"}
    said = "port to listen on; 0: any free port. The line at the start names it"
    assert option_tables.row(port, own) == f"| `--port` | 8000 | 0 to 65,535 | {said} |"


def test_every_field_of_speculative():
    names = set(re.findall(r"^\| `(\w+)` \|", section("Speculative decoding of one request"), re.MULTILINE))
    assert names == set(fields.Speculative.model_fields)


def codes_of(path):
    """The codes that a module gives to its ApiErrors."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError":
            given = [*node.args[3:4], *(k.value for k in node.keywords if k.arg == "code")]
            yield from (v.value for v in given if isinstance(v, ast.Constant))


def test_error_codes_are_the_servers():
    """cancelled: nobody is there to read it. no_key: only replicas have it."""
    named = {code for _, _, codes in rows("status") for code in re.findall("`([a-z_]+)`", codes)}
    raised = {code for path in (PACKAGE / "server").rglob("*.py") for code in codes_of(path)}
    assert len(raised) > 15 and raised - {"cancelled", "no_key"} <= named, raised - named
    other = {kind.value for kind in ErrorKind} | {"not_found", "method_not_allowed"}  # http_error in app.py
    assert named <= raised | other, named - raised


def test_limits_are_the_servers():
    limits = " ".join(" ".join(cells) for cells in rows("what")) + section("Limits")
    for number in (
        fields.MAX_STOP,
        fields.MAX_STOP_LENGTH,
        fields.MAX_BIAS,
        chat.MAX_MESSAGES,
        chat.MAX_PARTS,
        chat.MAX_TOOLS,
        fields.MAX_GRAMMAR,
        fields.MAX_NESTING,
        fields.MAX_VALUES,
        completions.MAX_PROMPTS,
        LEAST_BODY,
        BODY_PER_TOKEN,
    ):
        assert re.search(rf"\b{number:,}\b", limits), number


def test_metrics_are_the_servers(server):
    assert ask(server.client, path="/v1/completions", prompt=PROMPT, max_tokens=4).status_code == 200
    until(lambda: "vllm:request_success_total{" in server.client.get("/metrics").text)
    found = set(re.findall(r"^# TYPE (\S+)", server.client.get("/metrics").text, re.MULTILINE))
    found = {name for name in found if not name.endswith("_created")}
    cells = [cell for first in ("name", "vLLM's name") for cell, *_ in rows(first)]
    named = {name for cell in cells for name in re.findall(r"`((?:eagle3_|vllm:|process_)\w+)", cell)}
    planner = {name for name in named if name.startswith("eagle3_planner_")}  # absent before the first plan
    assert named - planner <= found, named - found
    ours = {name for name in found if name.startswith(("eagle3_", "vllm:"))}
    assert ours <= named, ours - named


def test_fields_of_the_log(server, caplog):
    name = "eagle3_llama.server.access"
    with caplog.at_level(logging.INFO, name):
        assert ask(server.client, path="/v1/completions", prompt=PROMPT, max_tokens=4).status_code == 200
        assert server.client.get("/slots", headers={"Authorization": "Bearer x"}).status_code == 401
        until(lambda: len(caplog.records) >= 2)
    answered, refused = (json.loads(r.message) for r in caplog.records[:2])
    sample = re.search(r"^    (\{\"request_id\".*?\})\n", section("Logs"), re.MULTILINE | re.DOTALL)[1]
    assert list(json.loads(sample)) == list(answered)
    assert (refused["status"], refused["error"]) == (401, "invalid_api_key")


def test_a_request_of_another_site_is_logged_with_its_code(files, caplog):
    small = {"model": files[0], "eagle": None, "n_ctx": 256, "n_parallel": 1, "threads": 1}
    with running(settings(**small)) as s, caplog.at_level(logging.INFO, "eagle3_llama.server.access"):
        assert s.client.get("/slots", headers={"Origin": "https://evil.example"}).status_code == 403
        assert s.client.get("/slots", headers={"Host": "evil.example"}).status_code == 403
        until(lambda: len(caplog.records) >= 2)
    assert [json.loads(r.message)["error"] for r in caplog.records[:2]] == ["origin", "host"]


def test_commands_send_json_that_the_server_takes(server):
    """The bodies of the page's curl commands, each to its route."""
    bash = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ")
    commands = [shlex.split(c) for c in re.findall(r"^curl (?:[^'\n]|'[^']*')*", bash, re.MULTILINE)]
    bodies = [(c[1], c[c.index("-d") + 1]) for c in commands if "-d" in c and "/v1/" in c[1]]
    assert len(bodies) >= 3
    for url, body in bodies:
        path = url.removeprefix("http://127.0.0.1:8000")
        others = {"/v1/messages": messages_body.MessagesBody, "/v1/completions": completions.CompletionBody}
        model = chat.ChatBody if "chat" in path else others[path]
        model.model_validate_json(body)
