"""Requests of agents, from the first to the twentieth, as they send them today; texts are short.

An agent sends its whole history each time. SESSIONS has the route of each, and a function of the turn, from
0, that makes its body. Every fifth turn begins with words of the user; the others go on from a tool's result.
"""

import json

TURNS, CYCLE = 20, 5
PNG = "data:image/png;base64,iVBORw0KGgo="
RUN = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
LOOK = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
WORDS = ("Look around.", "What does the picture show?", "Ask another agent.", "Search for it.")
PATCH = 'start: "*** Begin Patch" LF change+ "*** End Patch"'


def function(name, parameters, **more):
    return {"type": "function", "name": name, "description": f"The tool {name}.", "strict": False, **more} | {
        "parameters": parameters
    }


def text(role, words):
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": words}]}


def codex_tools():
    """Of Codex 0.171: seven functions, a namespace with five, and a hosted tool."""
    names = "write_stdin request_user_input get_goal create_goal update_goal".split()
    agents = "close_agent resume_agent send_input spawn_agent wait_agent".split()
    about = "Tools for spawning and managing sub-agents."
    space = {"type": "namespace", "name": "multi_agent_v1", "description": about}
    return [
        function("exec_command", RUN),
        *(function(name, RUN) for name in names),
        function("view_image", LOOK),
        space | {"tools": [function(name, RUN) for name in agents]},
        {"type": "web_search", "external_web_access": False},
    ]


def codex_turn(turn):
    """What Codex adds to its history between the request `turn` and the next."""
    call = {"type": "function_call", "call_id": f"c{turn}", "arguments": '{"cmd": "ls"}', "id": f"fc_{turn}"}
    out = {"type": "function_call_output", "call_id": f"c{turn}", "output": "a.py\nb.png"}
    thought = {"type": "reasoning", "id": f"rs_{turn}", "summary": [], "content": None}
    shell = {"type": "local_shell_call", "id": "x", "call_id": f"c{turn}", "status": "completed"}
    shell["action"] = {"type": "exec", "command": ["ls"], "env": None, "timeout_ms": None}
    shown = [{"type": "input_text", "text": "It is this:"}, {"type": "input_image", "image_url": PNG}]
    searched = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}}
    patch = {"type": "custom_tool_call", "call_id": f"c{turn}", "name": "apply_patch", "input": "*** x"}
    return (
        [thought | {"encrypted_content": "gAAA"}, call | {"name": "exec_command"}, out],
        [call | {"name": "view_image", "arguments": '{"path": "b.png"}'}, out | {"output": shown}],
        [call | {"name": "spawn_agent", "namespace": "multi_agent_v1"}, out]
        if turn % 2
        else [patch, out | {"type": "custom_tool_call_output"}],
        [searched, shell, out, {"type": "compaction", "encrypted_content": "gAAA"}],
        [text("assistant", "Done.") | {"phase": "final_answer"}],
    )[turn % CYCLE]


def codex(turn):
    """POST /v1/responses of Codex."""
    items = [text("developer", "You are Codex."), text("developer", "There are no skills.")]
    items += [text("user", "<environment_context></environment_context>")]
    for i in range(turn + 1):
        items += [text("user", WORDS[i // CYCLE])] if i % CYCLE == 0 else []
        items += codex_turn(i) if i < turn else []
    return {
        "model": "local",
        "input": items,
        "tools": codex_tools(),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a22fbe-1052",
        "client_metadata": {"x-codex-turn-metadata": json.dumps({"turn_id": str(turn)})},
    }


def codex_of_openai(turn):
    """The same with what Codex sends to OpenAI's own models: a patch's grammar, and a search for tools."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": PATCH}
    found = function("create_event", RUN, defer_loading=True)
    more = [
        {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": RUN},
        {"type": "local_shell"},
    ]
    space = {"type": "namespace", "name": "mcp__calendar__", "description": "A calendar.", "tools": [found]}
    asked = {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {"cmd": "x"}}
    got = {"type": "tool_search_output", "call_id": "s", "execution": "client", "status": "completed"}
    body = codex(turn)
    searched = [asked, got | {"tools": [space]}] if turn > CYCLE else []
    return body | {"tools": body["tools"] + more, "input": body["input"][:-1] + searched + body["input"][-1:]}


def claude_turn(turn):
    """(what the model wrote, what the client answers) of Claude Code."""
    use = {"type": "tool_use", "id": f"t{turn}", "name": "Bash", "input": {"cmd": "ls"}}
    result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": "a.py", "is_error": False}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    source = {"type": "base64", "media_type": "image/png", "data": PNG.partition(",")[2]}
    searched = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    paper = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A paper."}}
    hit = {"type": "search_result", "source": "b", "title": "B", "content": [{"type": "text", "text": "x"}]}
    return (
        ([thought, use], [result]),
        ([use | {"name": "Read"}], [result | {"content": [{"type": "image", "source": source}]}]),
        ([searched, found, use], [result | {"content": [{"type": "tool_reference", "tool_name": "Grep"}]}]),
        ([use], [result, paper, hit]),
        ([{"type": "text", "text": "Done."}], []),
    )[turn % CYCLE]


def claude(turn):
    """POST /v1/messages of Claude Code 2.1.332: a system message follows the user's first words."""
    mark = {"cache_control": {"type": "ephemeral"}}
    reminder = {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}
    turns = [{"role": "user", "content": [reminder, {"type": "text", "text": WORDS[0]}]}]
    where = "# Environment\nThe tools of MCP are deferred."
    turns += [{"role": "system", "content": where if turn else [{"type": "text", "text": where}]}]
    for i in range(turn):
        written, answered = claude_turn(i)
        words = [{"type": "text", "text": WORDS[(i + 1) // CYCLE]}] if (i + 1) % CYCLE == 0 else []
        turns += [{"role": "assistant", "content": written}, {"role": "user", "content": answered + words}]
    if turn:
        turns[-1] = turns[-1] | {"content": [*turns[-1]["content"][:-1], turns[-1]["content"][-1] | mark]}
    about = lambda name: {"name": name, "description": f"The tool {name}.", "input_schema": RUN}
    return {
        "model": "local",
        "max_tokens": 8,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.332.{turn}b; cch=0;"},
            {"type": "text", "text": "You are Claude Code."} | mark,
        ],
        "messages": turns,
        "tools": [
            *(about(name) for name in ("Bash", "Read")),
            about("Grep") | {"defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "metadata": {"user_id": "user_1"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def chat_of(turn, results, system, more, parts=False, begun=None):
    """POST /v1/chat/completions of an agent. results(i): the messages that answer the i-th call.

    parts: whether texts are lists of parts. begun: what an assistant's message with a call has besides.
    """
    said = (lambda words: [{"type": "text", "text": words}]) if parts else (lambda words: words)
    begun = {"content": "", "reasoning_content": "Hm."} if begun is None else begun
    messages = [system] if isinstance(system, dict) else [{"role": "system", "content": system}]
    for i in range(turn + 1):
        messages += [{"role": "user", "content": said(WORDS[i // CYCLE])}] if i % CYCLE == 0 else []
        if i == turn:
            break
        if i % CYCLE == CYCLE - 1:
            messages.append({"role": "assistant", "content": said("Done.")})
            continue
        call = {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": "bash", "arguments": '{"cmd": "ls"}'},
        }
        messages += [{"role": "assistant", **begun, "tool_calls": [call]}, *results(i)]
    about = {"name": "bash", "description": "Runs a command.", "parameters": RUN}
    tools = [{"type": "function", "function": about}]
    return {"model": "local", "messages": messages, "tools": tools, "stream": True, **more} | {
        "stream_options": {"include_usage": True}
    }


NO_WORDS = {"content": None}


def results_of(said, picture=None):
    """The results of tools as most agents send them; a picture that a tool read follows as the user's."""

    def results(i):
        made = [{"role": "tool", "tool_call_id": f"call_{i}", "content": said}]
        image = [*(picture or []), {"type": "image_url", "image_url": {"url": PNG}}]
        return [*made, {"role": "user", "content": image}] if i % CYCLE == 1 and picture is not None else made

    return results


def opencode(turn):
    """By the AI SDK's openai-compatible."""
    results = results_of("a.py", [{"type": "text", "text": "Attached:"}])
    return chat_of(
        turn, results, "You are opencode.", {"max_tokens": 8, "tool_choice": "auto", "temperature": 0}
    )


def cline(turn):
    """By the same package, with results as JSON."""
    results = results_of('[{"query": "ls", "result": "a.py", "success": true}]', [])
    return chat_of(turn, results, "You are Cline.", {"tool_choice": "auto"}, begun=NO_WORDS)


def qwen_code(turn):
    """Its results of tools have parts, also pictures."""

    def results(i):
        parts = [{"type": "text", "text": "a.py"}]
        parts += [{"type": "image_url", "image_url": {"url": PNG}}] if i % CYCLE == 1 else []
        return [{"role": "tool", "tool_call_id": f"call_{i}", "content": parts}]

    given = {
        "max_tokens": 8,
        "temperature": 0,
        "top_p": 0.95,
        "metadata": {"sessionId": "s", "promptId": "p"},
    }
    system = [{"type": "text", "text": "You are Qwen Code.", "cache_control": {"type": "ephemeral"}}]
    return chat_of(turn, results, system, given)


def continue_cli(turn):
    return chat_of(turn, results_of("a.py\n"), "You are Continue.", {"max_tokens": 8}, begun={"content": ""})


def pi(turn):
    """Of a model that thinks, for which its system message is the developer's."""
    given = {"store": False, "max_completion_tokens": 8, "reasoning_effort": "medium"}
    results = results_of("a.py", [{"type": "text", "text": "Attached image(s) from tool result:"}])
    system = {"role": "developer", "content": "You are pi."}
    thought = NO_WORDS | {"reasoning_content": "Hm."}
    return chat_of(turn, results, system, given, parts=True, begun=thought)


def goose(turn):
    """What it says of the time moves on: it stands before the newest of the assistant's messages."""
    results = results_of("This tool result included an image that is uploaded in the next message.", [])
    body = chat_of(turn, results, "You are goose.", {"max_tokens": 8}, begun=NO_WORDS)
    now = {"role": "user", "content": f"<info-msg>\nIt is currently 13:{turn:02}\n</info-msg>"}
    said = [i for i, m in enumerate(body["messages"]) if m["role"] == "assistant"]
    at = said[-1] if said else 1
    return body | {"messages": [*body["messages"][:at], now, *body["messages"][at:]]}


def gptme(turn):
    """Three system messages, and more of them within; a call as words has its result as a system message."""
    block = lambda role, words: {"role": role, "content": [{"type": "text", "text": words}]}
    result = lambda i: [
        {"role": "tool", "tool_call_id": f"call_{i}", "content": block("tool", "a.py")["content"]}
    ]
    body = chat_of(turn, result, "", {"temperature": 0.0, "top_p": 0.1}, parts=True, begun={})
    out = [block("system", words) for words in ("You are gptme.", "# Boundary", "## System")]
    for m in body["messages"][1:]:
        calls = m.get("tool_calls")
        if calls and int(calls[0]["id"].removeprefix("call_")) % CYCLE == 2:
            m = block("assistant", "I look.\n\n```shell\nls\n```")
        elif m["role"] == "tool" and out[-1]["role"] == "assistant" and "tool_calls" not in out[-1]:
            m = block("system", "Ran allowlisted command: `ls`\n\n`a.py`\n")
        out.append(m)
    return body | {"messages": out}


def mini_swe_agent(turn):
    """By LiteLLM, whose calls keep their index. It streams nothing."""
    body = chat_of(turn, results_of('{"returncode": 0, "output": "a.py"}'), "You help.", {}, begun={})
    for m in body["messages"]:
        m |= {"tool_calls": [{"index": 0, **m["tool_calls"][0]}]} if "tool_calls" in m else {}
    return {name: body[name] for name in ("model", "messages", "tools")}


def aider(turn):
    """It has no tools. The files stand before the newest words, which the rules of an answer follow."""
    said = lambda user, assistant: [
        {"role": "user", "content": user},
        {"role": "assistant", "content": assistant},
    ]
    edit = "a.py\n```\n<<<<<<< SEARCH\nold\n=======\nnew\n>>>>>>> REPLACE\n```\n"
    messages = [{"role": "system", "content": "Act as an expert software developer.\n" * 40}]
    messages += said("Change old to new.", edit) + said("I switched to a new code base.", "Ok.")
    for i in range(turn):
        messages += said(f"Edit {i}.  \n", f"\n{edit}\n")
    messages += said(f"I have *added these files to the chat*\na.py\n```\n{turn}\n```", "Ok.")
    messages.append(
        {"role": "user", "content": f"Edit {turn}.\n\n# *SEARCH/REPLACE block* Rules:\nKeep to it."}
    )
    return {"model": "local", "messages": messages, "stream": True, "temperature": 0}


SESSIONS = {
    "codex": ("/v1/responses", codex),
    "codex_of_openai": ("/v1/responses", codex_of_openai),
    "claude": ("/v1/messages", claude),
    "opencode": ("/v1/chat/completions", opencode),
    "qwen_code": ("/v1/chat/completions", qwen_code),
    "continue": ("/v1/chat/completions", continue_cli),
    "cline": ("/v1/chat/completions", cline),
    "pi": ("/v1/chat/completions", pi),
    "goose": ("/v1/chat/completions", goose),
    "gptme": ("/v1/chat/completions", gptme),
    "mini_swe_agent": ("/v1/chat/completions", mini_swe_agent),
    "aider": ("/v1/chat/completions", aider),
}
