"""An API is a folder and its name in app.py: without one of them, the others still answer."""

import json
import shutil
import sys

import pytest
import templates
from commands import run
from paths import ROOT

SERVER = ROOT / "eagle3_llama" / "server"
TALK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
# what tells whether an API is there: a path and a body, None for GET
ASKED = {
    "openai": ("/v1/models", None),
    "anthropic": ("/v1/messages/count_tokens", {"model": "x", "messages": TALK["messages"]}),
    "responses": ("/v1/responses/input_tokens", {"input": "x"}),
    "tokens": ("/tokenize", {"content": "x"}),
    "embeddings": ("/v1/embeddings", {"input": "x"}),
    "llama_server": ("/completion", {"prompt": "x", "n_predict": 1}),
}
# A process of its own, because it imports the server several times: from a folder with a part of it.
SERVES = """
import json, sys
import eagle3_llama
from eagle3_llama.batching import Batcher, BatchSettings
from fastapi.testclient import TestClient

target, template = sys.argv[1:3]
folders, asked = map(json.loads, sys.argv[3:])
batcher = Batcher(BatchSettings(model=target, n_ctx=128, n_parallel=1, n_threads=1))
statuses, places = {}, eagle3_llama.__path__[:]
# an editable install finds each file of the checkout by itself
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
for gone, folder in folders.items():
    for name in [name for name in sys.modules if name.startswith("eagle3_llama.server")]:
        del sys.modules[name]
    eagle3_llama.__path__[:] = [folder, *places]
    from eagle3_llama.server.http.app import create_app
    from eagle3_llama.server.settings import ServerSettings
    more = {"embeddings": "target", "chat_template_file": template}
    app = create_app(ServerSettings(model=target, n_ctx=128, n_parallel=1, **more), batcher)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        ask = lambda path, body: client.get(path) if body is None else client.post(path, json=body)
        assert client.get("/openapi.json").status_code == 200
        statuses[gone] = {name: ask(*question).status_code for name, question in asked.items()}
batcher.close()
print(json.dumps(statuses))
"""


@pytest.fixture(scope="module")
def statuses(files, tmp_path_factory):
    """What each API answers, by the one that is not there."""
    folders = {}
    for gone in ASKED:
        folders[gone] = folder = tmp_path_factory.mktemp(gone)
        shutil.copytree(SERVER, folder / "server", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.rmtree(folder / "server" / gone)
        app = folder / "server" / "http" / "app.py"
        named = [line for line in app.read_text().splitlines() if f"import routes as {gone}" not in line]
        listed = [i for i, line in enumerate(named) if line.startswith("APIS")]
        named[listed[0]] = named[listed[0]].replace(f"{gone}, ", "").replace(f", {gone}", "")
        app.write_text("\n".join(named) + "\n")
    given = [templates.file_of("Qwen-Qwen3-0.6B")]
    given += [json.dumps({name: str(path) for name, path in folders.items()}), json.dumps(ASKED)]
    return json.loads(run([sys.executable, "-c", SERVES, files[0], *given], cwd=ROOT).stdout)


def test_every_folder_of_routes_is_an_api():
    assert {path.parent.name for path in SERVER.glob("*/routes.py")} == ASKED.keys()


@pytest.mark.parametrize("gone", ASKED)
def test_the_others_answer(statuses, gone):
    found = statuses[gone]
    assert found.pop(gone) == 404
    assert set(found.values()) == {200}, found
