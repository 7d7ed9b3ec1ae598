#!/usr/bin/env python3
"""Starts this project's server with the options of llama.cpp's server: llama_server_suite.py's launcher.

    llama_server_launcher.py --port 8080 --ctx-size 512 --parallel 2 ...

The model is the demo's with its head, whatever model the options name. An option that would change what the
tests see, and that this server does not have, ends it with status 2. It becomes the server's process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

from eagle3_llama.models import shipped_head, smollm2

# ours with the same value
SAME = {
    "--port": "--port",
    "--host": "--host",
    "--alias": "--model-alias",
    "--threads": "--threads",
    "--temp": "--temp",
    "--seed": "--seed",
    "--n-predict": "--n-predict",
    "--slot-save-path": "--slot-save-path",
    "--api-key": "--api-key",
    "--chat-template-file": "--chat-template-file",
}
# without effect here: what the model is, what every server of ours does, and sizes that only cost speed
IGNORED = set(
    "--offline --slots --no-slots --jinja --no-jinja --metrics --cont-batching --swa-full --verbose "
    "--backend_sampling".split()
)
IGNORED_VALUES = set("--hf-repo --hf-file --batch-size --ubatch-size -fa".split())
REASONING = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}, "auto": {}}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def translated(given: list[str]) -> list[str]:
    """The options of this server. Raises SystemExit for one that it lacks."""
    out: list[str] = []
    context, slots, words = 4096, 1, iter(given)
    shared = "--kv-unified" in given  # the slots share the context, of which one may have all
    for word in words:
        if word in IGNORED or word == "--kv-unified":
            continue
        value = next(words, "")
        if word in SAME:
            out += [SAME[word], value]
        elif word == "--ctx-size":
            context = int(value)
        elif word == "--parallel":
            slots = int(value)
        elif word == "--reasoning" and value in REASONING:
            out += ["--chat-template-kwargs", json.dumps(REASONING[value])]
        elif word == "--chat-template" and (value == "chatml" or " " in value):
            out += ["--chat-template-file", template_file(CHATML if value == "chatml" else value)]
        elif word not in IGNORED_VALUES:
            raise SystemExit(f"this server has no option {word} {value}")
    own = context if shared else max(context // slots, 64)
    return [*out, "--n-parallel", str(slots), "--n-ctx", str(own)]


def template_file(text: str) -> str:
    """A file with the text of a template, which the process that is started reads."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
        file.write(text)
    return file.name


def main() -> None:
    files = ["--model", str(smollm2("Q8_0")), "--eagle", str(shipped_head())]
    options = ["--template-timeout", "20", *translated(sys.argv[1:])]
    os.execv(sys.executable, [sys.executable, "-m", "eagle3_llama.server", *files, *options])


if __name__ == "__main__":
    main()
