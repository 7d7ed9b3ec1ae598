"""What agents of two kinds say in 20 turns: a long system prompt, tools, their results, and a user's words.

The demo model was trained for no tools, so most answers are told by a grammar: thoughts, texts and calls as
Qwen3 writes them. Every fifth is the model's own.
"""

import json

from client_tools import WHOLE, written

TURNS, CYCLE = 20, 5
SYSTEM = "You are an agent that works in a repository.\n" + "\n".join(
    f"Rule {i}: before you change file number {i}, read it, and say in one sentence what you found there."
    for i in range(1, 41)
)
TASKS = (
    "Find out why the build fails.",
    "Now mend it, and run the tests.",
    "Write a line about it in the changelog.",
    "What did you change?",
)
RUN = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout": {"type": "integer"}},
    "required": ["command"],
    "additionalProperties": False,
}
EDIT = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
    "required": ["path", "old", "new"],
    "additionalProperties": False,
}
TOOLS = {"shell": ("Runs a command.", RUN), "edit": ("Replaces text in a file.", EDIT)}


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(*words):
    return call("shell", {"command": list(words)})


def told(turn):
    """(what the model writes, and the kinds of its parts) in a turn; (None, ()) if that is its own affair."""
    edit = call("edit", {"path": f"src/{turn}.c", "old": "int n;", "new": 'int n = "\\n";'})
    return (
        (f"<think>\nI look at part {turn}.\n</think>\n\n{shell('ls', str(turn))}", ("thoughts", "call")),
        (shell("cat", f"src/{turn}.c"), ("call",)),
        (f"It lacks a value in part {turn}.\n{edit}", ("text", "call")),
        (f"{shell('make', str(turn))}\n{shell('make', 'test')}", ("call", "call")),
        (None, ()),
    )[turn % CYCLE]


def asked(turn):
    """(fields beside the conversation, the most tokens of the answer) of a turn."""
    text, _ = told(turn)
    return (written(text), WHOLE) if text else ({"seed": turn, "temperature": 0.7}, 24)


def result(turn, name, arguments):
    """What a tool gives back."""
    return f"{name} {arguments} in turn {turn}:\n" + "\n".join(f"line {i}: ok" for i in range(4)) + "\n"


def decoded_again(turns):
    """The share of the prompts' tokens, from the second turn on, that the server had decoded before.

    turns: (tokens of the prompt, those of them that were found, tokens of the answer) of each.
    """
    again = sum(max(p + a - 1 - found, 0) for (p, _, a), (_, found, _) in zip(turns, turns[1:]))
    return again / sum(prompt for prompt, _, _ in turns[1:])
