"""Agents from npm, as installed, with an empty home: a turn with a tool that they run, and a second turn.

    .venv/bin/python -m pytest tests/by_hand/real_agents.py

They come from npm's registry during the test. What they run has no other address than the loopback's. Not
part of ./scripts/test, because each takes minutes: test_agent_sessions.py replays what they send.
"""

import json
import os
import shutil

import pytest
import templates
from client_tools import call_of
from commands import run
from scribe import Scribe
from server_tools import running, settings

WORD, ANSWER, AGAIN = "tulip-4711", "The word is tulip-4711.", "You asked for a word."
CONTEXT = 32_768
MOST_AGAIN = 0.1  # of the second turn's prompt, decoded again

pytestmark = pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")), reason="needs node and npm, for agents of Node"
)


@pytest.fixture(scope="module")
def server():
    """With the template of a model that knows tools."""
    given = {"n_ctx": CONTEXT, "n_parallel": 2, "template_timeout": 60.0, "timeout": 600.0}
    with running(settings(chat_template_file=templates.file_of("Qwen-Qwen3-0.6B"), **given)) as s:
        yield s


class Agent:
    """An agent in a folder of its own: home, packages, and work, which has a file with a word."""

    def __init__(self, place, package):
        self.home, self.packages, self.work = (place / name for name in ("home", "packages", "work"))
        for folder in (self.home, self.packages, self.work):
            folder.mkdir()
        (self.work / "word.txt").write_text(f"{WORD}\n")
        install = ["npm", "install", "--prefix", self.packages, "--no-audit", "--no-fund", package]
        done = run(install, code=None, cwd=place, env={**os.environ, "HOME": str(self.home)})
        if done.returncode != 0:
            pytest.skip(f"npm cannot install {package}: {done.stderr[-300:]}")

    def environment(self, **more):
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {**kept, "HOME": str(self.home), "TERM": "dumb", "CI": "1", **more}

    def run(self, command, *words, **more):
        """What it says. It finds no other address than the loopback's."""
        proxies = dict.fromkeys(
            ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
        )
        given = {**proxies, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", **more}
        program = self.packages / "node_modules" / ".bin" / command
        return run([program, *words], cwd=self.work, env=self.environment(**given)).stdout


def codex(agent, url):
    """(the agent's tool that reads the file, what runs a turn)."""
    folder = agent.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'model = "local"\nmodel_provider = "local"\ncheck_for_update_on_startup = false\n'
        f"model_context_window = {CONTEXT}\n[analytics]\nenabled = false\n"
        f'[model_providers.local]\nname = "local"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        "request_max_retries = 0\nstream_max_retries = 0\nstream_idle_timeout_ms = 600000\n"
    )
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    first = lambda words: agent.run("codex", "exec", *flags, words)
    then = lambda words: agent.run("codex", "exec", *flags, "resume", "--last", words)
    return call_of("exec_command", cmd="cat word.txt"), first, then


def opencode(agent, url):
    limit = {"context": CONTEXT, "output": 1000}
    model = {"name": "local", "tool_call": True, "limit": limit}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none"}}
    config = {
        "provider": {"local": provider | {"models": {"any": model}}},
        "permission": {"bash": "allow", "read": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    (agent.work / "opencode.json").write_text(json.dumps(config))
    turn = lambda *words: agent.run("opencode", "run", "--model", "local/any", *words)
    call = call_of("bash", command="cat word.txt", description="Reads the word")
    return call, turn, lambda words: turn("--continue", words)


AGENTS = {"codex": ("@openai/codex@0.171.0", codex), "opencode": ("opencode-ai@1.18.33", opencode)}


@pytest.mark.parametrize("name", AGENTS)
def test_two_turns(server, tmp_path, name):
    """A call that the agent runs, its result, an answer; then words that go on from it."""
    package, made = AGENTS[name]
    agent = Agent(tmp_path, package)
    with Scribe(server.url, [""]) as scribe:
        call, first, then = made(agent, scribe.url)
        scribe.texts = [call, ANSWER, AGAIN]
        said = first("Which word is in word.txt?")
        assert not scribe.refused, scribe.refused
        assert ANSWER in said and len(scribe.bodies) == 2, said
        assert WORD not in json.dumps(scribe.bodies[0]) and WORD in json.dumps(scribe.bodies[1])
        said = then("What did I ask?")
        assert not scribe.refused, scribe.refused
        assert AGAIN in said and len(scribe.bodies) == 3, said
        assert ANSWER in json.dumps(scribe.bodies[2])
        for turn in (1, 2):
            prompt, found = scribe.cached(turn)
            assert prompt - found <= MOST_AGAIN * prompt, (turn, prompt, found)
