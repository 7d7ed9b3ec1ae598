"""OpenAI's client for Node and the AI SDK, in the versions of npm/package.json."""

import shutil
from pathlib import Path

import pytest
from commands import run

HERE = Path(__file__).resolve().parent / "npm"

pytestmark = pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")), reason="needs node and npm, for clients of Node"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The scripts, and the packages beside them."""
    place = tmp_path_factory.mktemp("npm")
    for file in HERE.iterdir():
        if file.is_file():
            shutil.copy(file, place)
    done = run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"], code=None, cwd=place)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install the clients of Node: {done.stderr[-300:]}")
    return place


@pytest.mark.parametrize(
    "script, case",
    [("openai", case) for case in ("chat", "stream", "runTools", "responses")]
    + [("ai", case) for case in ("streamText", "namedInTwoSteps", "required", "requiredStream")],
)
def test_a_client_of_node(folder, server, script, case):
    run(["node", f"{script}.mjs", case, server.url], seconds=240, cwd=folder)
