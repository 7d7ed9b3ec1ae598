"""Agents from npm and pip, as installed, with an empty home: a turn with a tool that they run, and a second.

    .venv/bin/python -m pytest tests/by_hand/real_agents.py

They come from the registries during the test. What they run has no other address than the loopback's. Not
part of ./scripts/test, because each takes minutes: test_agent_sessions.py replays what they send.
"""

import functools
import json
import os
import shutil
import sys

import pytest
import templates
from client_tools import call_of
from commands import run
from scribe import Scribe
from server_tools import running, settings

WORD, ANSWER, AGAIN = "tulip-4711", "The word is tulip-4711.", "You asked for a word."
ROSE = "rose-4711"
CONTEXT = 32_768
MOST_AGAIN = 0.1  # of the second turn's prompt, decoded again


@pytest.fixture(scope="module")
def server():
    """With the template of a model that knows tools."""
    given = {"n_ctx": CONTEXT, "n_parallel": 2, "template_timeout": 60.0, "timeout": 600.0}
    with running(settings(chat_template_file=templates.file_of("Qwen-Qwen3-0.6B"), **given)) as s:
        yield s


class Agent:
    """An agent in a folder of its own: home, packages, and work, which has a file with a word."""

    def __init__(self, place, kind, *packages):
        """kind: npm or pip."""
        self.home, self.packages, self.work = (place / name for name in ("home", "packages", "work"))
        for folder in (self.home, self.packages, self.work):
            folder.mkdir()
        (self.work / "word.txt").write_text(f"{WORD}\n")
        if kind == "npm":
            if not (shutil.which("node") and shutil.which("npm")):
                pytest.skip("needs node and npm, for agents of Node")
            self.programs = self.packages / "node_modules" / ".bin"
            install = ["npm", "install", "--prefix", self.packages, "--no-audit", "--no-fund", *packages]
            env = {**os.environ, "HOME": str(self.home)}
        else:
            self.programs, env = self.packages / "bin", None
            run([sys.executable, "-m", "venv", self.packages])
            install = [self.programs / "pip", "install", "-q", *packages]
        done = run(install, code=None, cwd=place, env=env)
        if done.returncode != 0:
            pytest.skip(f"{kind} cannot install {packages}: {done.stderr[-300:]}")

    def run(self, command, *words, **more):
        """What it says. It finds no other address than the loopback's."""
        kept = {name: os.environ[name] for name in ("LANG",) if name in os.environ}
        path = f"{self.programs}:{os.environ['PATH']}"
        proxies = dict.fromkeys(
            ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
        )
        own = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        env = {**kept, "PATH": path, "HOME": str(self.home), "TERM": "dumb", "CI": "1"}
        env |= {**proxies, **own, **more}
        return run([self.programs / command, *words], cwd=self.work, env=env).stdout


def codex(agent, url):
    """(the agent's tool that reads the file, what runs a turn, what runs the next)."""
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


def claude(agent, url):
    """Of Anthropic's API. It asks for no other window than the model's it knows, unless it is told one."""
    env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "local"}
    env |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"}
    env |= {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT), "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1000"}
    turn = functools.partial(agent.run, "claude", "--dangerously-skip-permissions", **env)
    call = call_of("Bash", command="cat word.txt", description="Reads the word")
    return call, lambda words: turn("-p", words), lambda words: turn("--continue", "-p", words)


def qwen_code(agent, url):
    folder = agent.home / ".qwen"
    folder.mkdir()  # it would remember what was said, by a request of its own
    (folder / "settings.json").write_text(json.dumps({"memory": {"enableManagedAutoMemory": False}}))
    env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "local"}
    env["QWEN_STREAM_IDLE_TIMEOUT_MS"] = "0"  # it counts no comments, and its first prompt is long
    turn = functools.partial(agent.run, "qwen", "--auth-type", "openai", "--yolo", **env)
    call = call_of("read_file", file_path=str(agent.work / "word.txt"))
    return call, lambda words: turn("-p", words), lambda words: turn("--continue", "-p", words)


def continue_cli(agent, url):
    model = {"name": "local", "provider": "openai", "model": "local", "apiBase": f"{url}/v1"}
    model |= {"apiKey": "none", "roles": ["chat"], "capabilities": ["tool_use"]}
    model |= {"defaultCompletionOptions": {"contextLength": CONTEXT, "maxTokens": 1000}}
    config = agent.home / "config.yaml"
    config.write_text(json.dumps({"name": "local", "version": "1.0.0", "schema": "v1", "models": [model]}))
    turn = functools.partial(agent.run, "cn", "--config", config, "--auto", CONTINUE_TELEMETRY_ENABLED="0")
    call = call_of("Bash", command="cat word.txt")
    return call, lambda words: turn("-p", words), lambda words: turn("--resume", "-p", words)


def pi(agent, url):
    folder = agent.home / ".pi" / "agent"
    folder.mkdir(parents=True)
    model = {"id": "any", "contextWindow": CONTEXT, "maxTokens": 1000}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    (folder / "models.json").write_text(json.dumps({"providers": {"local": provider}}))
    turn = functools.partial(agent.run, "pi", "--offline", "--model", "local/any")
    call = call_of("bash", command="cat word.txt")
    return call, lambda words: turn("-p", words), lambda words: turn("--continue", "-p", words)


def cline(agent, url):
    """Goes on with a conversation in a terminal alone."""
    given = ["openai", "--apikey", "none", "--modelid", "any", "--baseurl", f"{url}/v1"]
    agent.run("cline", "auth", *given)
    return call_of("run_commands", commands=["cat word.txt"]), lambda words: agent.run("cline", words), None


def gptme(agent, url):
    """Ends a turn with a call of `complete`."""
    env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    flags = ["--non-interactive", "--name", "talk", "--model", "local/any"]
    turn = functools.partial(agent.run, "gptme", *flags, **env)
    return call_of("shell", command="cat word.txt"), turn, turn


def goose(agent, url):
    env = {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": "local", "OPENAI_HOST": url, "OPENAI_API_KEY": "none"}
    env |= {"GOOSE_MODE": "auto", "GOOSE_DISABLE_KEYRING": "1", "GOOSE_CONTEXT_LIMIT": str(CONTEXT)}
    flags = ["--name", "talk", "--with-builtin", "developer"]
    turn = functools.partial(agent.run, "goose", "run", *flags, GOOSE_TELEMETRY_ENABLED="false", **env)
    call = call_of("shell", command="cat word.txt")
    return call, lambda words: turn("-t", words), lambda words: turn("--resume", "-t", words)


def mini_swe_agent(agent, url):
    """A turn is all that it has, and ends with a command."""
    env = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none", "MSWEA_CONFIGURED": "1"}
    flags = ["--yolo", "--exit-immediately", "--model", "openai/any", "--task"]
    turn = functools.partial(agent.run, "mini", *flags, MSWEA_COST_TRACKING="ignore_errors", **env)
    return call_of("bash", command="cat word.txt"), turn, None


AGENTS = {
    "codex": (codex, "npm", "@openai/codex@0.171.0"),
    "opencode": (opencode, "npm", "opencode-ai@1.18.33"),
    "claude": (claude, "npm", "@anthropic-ai/claude-code@2.1.332"),
    "qwen_code": (qwen_code, "npm", "@qwen-code/qwen-code@0.24.4", "node@22"),
    "continue": (continue_cli, "npm", "@continuedev/cli@1.5.47", "node@22"),
    "cline": (cline, "npm", "cline@3.0.65"),
    "pi": (pi, "npm", "@mariozechner/pi-coding-agent@0.73.1", "node@22"),
    "goose": (goose, "npm", "@aaif/goose@0.20.1"),
    "gptme": (gptme, "pip", "gptme==0.35.1"),
    "mini_swe_agent": (mini_swe_agent, "pip", "mini-swe-agent==2.4.6"),
}
ENDS = {
    "gptme": call_of("complete"),
    "mini_swe_agent": call_of("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
}


@pytest.mark.parametrize("name", AGENTS)
def test_two_turns(server, tmp_path, name):
    """A call that the agent runs, its result, an answer; then words that go on from it."""
    made, *packages = AGENTS[name]
    agent, end = Agent(tmp_path, *packages), ENDS.get(name, "")
    with Scribe(server.url, [""]) as scribe:
        call, first, then = made(agent, scribe.url)
        scribe.texts = [call, ANSWER + end, AGAIN + end]
        said = first("Which word is in the file here?")
        assert not scribe.refused, scribe.refused
        assert ANSWER in said and len(scribe.bodies) == 2, said
        assert [WORD in json.dumps(body) for body in scribe.bodies] == [False, True]
        found_again(scribe, 1, MOST_AGAIN)
        if then is None:
            return
        said = then("What did I ask?")
        assert not scribe.refused, scribe.refused
        assert AGAIN in said and len(scribe.bodies) == 3, said
        assert ANSWER in json.dumps(scribe.bodies[2])
        found_again(scribe, 2, MOST_AGAIN)


def found_again(scribe, turn, most):
    """That of a turn's prompt no more was decoded again than this share."""
    prompt, found = scribe.cached(turn)
    assert prompt - found <= most * prompt, (turn, prompt, found)


EDIT = f"word.txt\n```\n<<<<<<< SEARCH\n{WORD}\n=======\n{ROSE}\n>>>>>>> REPLACE\n```\n"


def test_aider(server, tmp_path):
    """It has no tools: the model writes what is to be changed. It shows the file anew with each turn."""
    agent = Agent(tmp_path, "pip", "aider-chat==0.86.2")
    with Scribe(server.url, [f"So it is:\n\n{EDIT}", AGAIN], tools=False) as scribe:
        flags = "--no-git --no-check-update --analytics-disable --no-show-model-warnings --yes-always"
        flags += " --no-pretty --edit-format diff --map-tokens 0 --model openai/local"
        flags += f" --openai-api-base {scribe.url}/v1 --openai-api-key none"
        turn = functools.partial(agent.run, "aider", *flags.split(), "word.txt", "--message")
        turn("Put a rose in the place of the tulip.")
        assert not scribe.refused, scribe.refused
        assert (agent.work / "word.txt").read_text() == f"{ROSE}\n" and len(scribe.bodies) == 1
        said = turn("What did I ask?", "--restore-chat-history")
        assert not scribe.refused, scribe.refused
        assert AGAIN in said and len(scribe.bodies) == 2 and ROSE in json.dumps(scribe.bodies[1])
        found_again(scribe, 1, 0.5)
