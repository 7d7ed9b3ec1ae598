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


def chat_of(turn, results, system, more):
    """POST /v1/chat/completions of an agent. results(i): the messages that answer the i-th call."""
    messages = [{"role": "system", "content": system}]
    for i in range(turn + 1):
        messages += [{"role": "user", "content": WORDS[i // CYCLE]}] if i % CYCLE == 0 else []
        if i == turn:
            break
        if i % CYCLE == CYCLE - 1:
            messages.append({"role": "assistant", "content": "Done."})
            continue
        call = {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": "bash", "arguments": '{"cmd": "ls"}'},
        }
        said = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}
        messages += [said, *results(i)]
    about = {"name": "bash", "description": "Runs a command.", "parameters": RUN}
    tools = [{"type": "function", "function": about}]
    return {"model": "local", "messages": messages, "tools": tools, "stream": True, **more} | {
        "stream_options": {"include_usage": True}
    }


def opencode(turn):
    """By the AI SDK's openai-compatible: a picture that a tool read is a message of the user's."""

    def results(i):
        made = [{"role": "tool", "tool_call_id": f"call_{i}", "content": "a.py"}]
        image = [{"type": "text", "text": "Attached:"}, {"type": "image_url", "image_url": {"url": PNG}}]
        return [*made, {"role": "user", "content": image}] if i % CYCLE == 1 else made

    return chat_of(
        turn, results, "You are opencode.", {"max_tokens": 8, "tool_choice": "auto", "temperature": 0}
    )


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


SESSIONS = {
    "codex": ("/v1/responses", codex),
    "codex_of_openai": ("/v1/responses", codex_of_openai),
    "claude": ("/v1/messages", claude),
    "opencode": ("/v1/chat/completions", opencode),
    "qwen_code": ("/v1/chat/completions", qwen_code),
}
