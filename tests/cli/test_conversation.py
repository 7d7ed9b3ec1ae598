"""`eagle3-llama chat`: a full context and Ctrl-C end neither the program nor the conversation."""

import io
import re
import signal
import subprocess
import sys

import pytest
import tiny_models
from rich.console import Console

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.cli.conversation import converse, fit
from eagle3_llama.llama.chat import chat_tokens

N_CTX = 256
STATISTICS = re.compile(r"\[(\d+) tokens, [\d.]+/s(?:, [\d.]+ tokens per round, accepted: [a-z0-9, ]+)?\]")
LEFT_OUT = re.compile(rf"the context of {N_CTX} tokens is full: the oldest (\d+) messages are left out")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target whose answers have as many tokens as are asked for, and a head."""
    at = tmp_path_factory.mktemp("conversation")
    target = tiny_models.target(at / "target.gguf", ends=False)
    return str(target), str(tiny_models.head(at / "head.gguf"))


@pytest.fixture(scope="module")
def llm(files):
    llm = EagleLlama(files[0], eagle=files[1], n_ctx=N_CTX, n_batch=64, n_threads=1, verbose=False)
    yield llm
    llm.close()


class Terminal(io.StringIO):
    """What is printed; after so many writes `then` happens, as when a key is pressed."""

    def __init__(self, writes, then):
        super().__init__()
        self.left, self.then = writes, then

    def write(self, text):
        self.left -= 1
        if self.left == 0:
            self.then()
        return super().write(text)


class Typed(Console):
    """A console at which these lines are typed; an exception among them is raised."""

    def __init__(self, lines, file):
        super().__init__(file=file, highlight=False)
        self.lines, self.prompts = iter(lines), 0

    def input(self, *args, **kwargs):
        self.prompts += 1
        line = next(self.lines)
        if isinstance(line, type):
            raise line
        return line


def talk(llm, lines, n_predict=8, writes=0, then=lambda: None, system=None):
    terminal = Terminal(writes, then)
    console = Typed(lines, terminal)
    converse(llm, n_predict, system, console, temp=0.0)
    return terminal.getvalue(), console.prompts


def test_a_full_context_leaves_the_oldest_out(llm, capsys):
    _, prompts = talk(llm, ["a1 b2 c3 d4 e5 f6"] * 12 + [EOFError], n_predict=24, system="keep")
    said = capsys.readouterr().err
    assert prompts == 13 and "error" not in said
    assert STATISTICS.findall(said) == ["24"] * 12  # an answer to each message
    left_out = [int(n) for n in LEFT_OUT.findall(said)]  # whole turns
    assert left_out and all(n > 0 and n % 2 == 0 for n in left_out)


def test_what_is_left_out(llm):
    """Whole turns from the oldest on, no more than must be, never the system message or the question."""
    turns = [{"role": r, "content": f"{r} {i} a1 b2 c3 d4"} for i in range(6) for r in ("user", "assistant")]
    messages = [{"role": "system", "content": "keep"}, *turns, {"role": "user", "content": "last"}]
    kept, prompt = fit(llm, messages, 1000)
    assert (
        kept[0] == messages[0]
        and kept[-1] == messages[-1]
        and len(kept) % 2 == 0
        and kept[1:] == messages[-len(kept) + 1 :]
    )
    assert (
        prompt == chat_tokens(llm, kept)
        and len(prompt) + N_CTX // 4
        <= N_CTX
        < len(chat_tokens(llm, messages[:1] + messages[-len(kept) - 1 :])) + N_CTX // 4
    )
    short = messages[:2]
    assert fit(llm, short, 8)[0] is short
    with pytest.raises(EagleError, match="shorten it"):
        fit(llm, [{"role": "user", "content": "x " * N_CTX}], 8)


def test_a_message_that_is_too_long_is_left_out(llm, capsys):
    _, prompts = talk(llm, ["a1", "x" * 4 * N_CTX, "b2", EOFError])
    said = capsys.readouterr().err
    assert (
        prompts == 4
        and said.count("the conversation continues without this message") == 1
        and "--n-ctx" in said
    )
    assert said.count("/s") == 2


def test_ctrl_c_stops_the_answer_alone(llm, capsys):
    before = signal.getsignal(signal.SIGINT)
    whole, _ = talk(llm, ["a1", EOFError], n_predict=40)
    assert STATISTICS.findall(capsys.readouterr().err) == ["40"]
    stopped, prompts = talk(
        llm, ["a1", "b2", EOFError], n_predict=40, writes=5, then=lambda: signal.raise_signal(signal.SIGINT)
    )
    said = capsys.readouterr().err
    assert prompts == 3 and said.count("[stopped]") == 1 and signal.getsignal(signal.SIGINT) is before
    first, second = map(int, STATISTICS.findall(said))
    assert 0 < first < 40 == second and stopped[:first] == whole[:first]  # a token prints a character or more


def test_ctrl_c_at_the_prompt_ends_with_a_hint(llm, capsys):
    _, prompts = talk(llm, ["a1", KeyboardInterrupt, "never"])
    assert prompts == 2 and "Ctrl-C stops only the answer" in capsys.readouterr().err


def test_the_command(files):
    """The context that is asked for is rounded up to a multiple of 256, and all of it used."""
    lines = "".join("a1 b2 c3 d4 e5 f6 g7\n" for _ in range(10))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "eagle3_llama.cli",
            "chat",
            "-m",
            files[0],
            "--eagle",
            files[1],
            "-c",
            "200",
            "-n",
            "40",
            "--temp",
            "0",
            "-t",
            "1",
        ],
        input=lines,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and LEFT_OUT.search(done.stderr), done.stderr
    assert STATISTICS.findall(done.stderr) == ["40"] * 10
