"""Agents of 20 turns, as Codex and Claude Code send them: events, items sent back, and usage."""

import json

import anthropic
import openai
import pytest
import templates
from event_checks import message_of, response_of
from replays import CYCLE, SYSTEM, TASKS, TOOLS, TURNS, asked, decoded_again, result, told
from server_tools import running, settings

KEYS = tuple(f"{kind}-{drafts}" for kind in ("stored", "whole", "claude") for drafts in (True, False))
MOST_AGAIN = 0.05


@pytest.fixture(scope="module")
def server(batcher):
    """Each key has texts of its own, so no replay finds what another one left."""
    file = templates.file_of("Qwen-Qwen3-0.6B")
    given = settings(n_ctx=4096, chat_template_file=file, template_timeout=20.0, api_key=KEYS)
    with running(given, batcher) as s:
        yield s


def codex(server, stored, drafts):
    """The responses of a session, which goes on from the stored answer, or sends everything each time.

    What sends everything has half of the turns: the other API's session has all, and does the same.
    """
    key = f"{'stored' if stored else 'whole'}-{drafts}"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    tools = [
        {"type": "function", "name": name, "description": about, "parameters": schema, "strict": False}
        for name, (about, schema) in TOOLS.items()
    ]
    history, made = [], []
    for turn in range(TURNS if stored else TURNS // 2):
        items = [item for item in made[-1].output if item.type == "function_call"] if made else []
        calls = [item for item in items if item.status == "completed"]  # none that was cut
        new = [
            {"type": "function_call_output", "call_id": c.call_id, "output": text}
            for c in calls
            for text in [result(turn, c.name, c.arguments)]
        ]
        if turn % CYCLE == 0:
            text = [{"type": "input_text", "text": TASKS[turn // CYCLE]}]
            new.append({"type": "message", "role": "user", "content": text})
        extra, most = asked(turn)
        more = {"previous_response_id": made[-1].id} if stored and made else {}
        events = client.responses.create(
            model="any",
            instructions=SYSTEM,
            input=new if stored else history + new,
            tools=tools,
            tool_choice="auto",
            parallel_tool_calls=True,
            reasoning={"effort": "medium", "summary": "auto"},
            include=["reasoning.encrypted_content"],
            prompt_cache_key="session-1",
            store=stored,
            stream=True,
            max_output_tokens=most,
            extra_body={"speculative": {"enabled": drafts}, **extra},
            **more,
        )
        made.append(response_of(list(events)))
        history += new + [item.to_dict() for item in made[-1].output]
    return made


def parts_of(response):
    """What the model wrote, without ids."""
    texts = lambda item: "".join(part.text for part in item.content or ())
    is_call = lambda item: item.type == "function_call"
    return [(i.type, (i.name, i.arguments) if is_call(i) else texts(i)) for i in response.output]


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "whole"])
def test_a_codex_like_session(server, stored):
    sessions = [codex(server, stored, drafts) for drafts in (True, False)]
    assert [parts_of(r) for r in sessions[0]] == [parts_of(r) for r in sessions[1]]
    names = {"thoughts": "reasoning", "text": "message", "call": "function_call"}
    for made in sessions:
        for turn, response in enumerate(made):
            text, kinds = told(turn)
            if text:
                assert [i.type for i in response.output] == [names[kind] for kind in kinds]
                assert response.status == "completed"
            usage = response.usage
            assert usage.total_tokens == usage.input_tokens + usage.output_tokens
            assert 0 <= usage.input_tokens_details.cached_tokens < usage.input_tokens
            assert (usage.output_tokens_details.reasoning_tokens > 0) is ("thoughts" in kinds) or not text
        used = [r.usage for r in made]
        counts = [(u.input_tokens, u.input_tokens_details.cached_tokens, u.output_tokens) for u in used]
        assert decoded_again(counts) <= MOST_AGAIN, counts


def claude(server, drafts):
    """The messages of a session, which sends everything each time, with the marks of a cache."""
    client = anthropic.Anthropic(base_url=server.url, api_key=f"claude-{drafts}", max_retries=0)
    mark = {"cache_control": {"type": "ephemeral"}}
    tools = [
        {"name": name, "description": about, "input_schema": schema, **mark}
        for name, (about, schema) in TOOLS.items()
    ]
    system = [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": SYSTEM, **mark}]
    history, made = [], []
    for turn in range(TURNS):
        calls = [block for block in made[-1]["content"] if block["type"] == "tool_use"] if made else []
        new = [
            {
                "type": "tool_result",
                "tool_use_id": c["id"],
                "content": [{"type": "text", "text": result(turn, c["name"], json.dumps(c["input"]))}],
                "is_error": i > 0,
            }
            for i, c in enumerate(calls)
        ]
        if turn % CYCLE == 0:
            new.append({"type": "text", "text": TASKS[turn // CYCLE]})
        history.append({"role": "user", "content": [*new[:-1], {**new[-1], **mark}]})
        extra, most = asked(turn)
        events = client.messages.create(
            model="any",
            max_tokens=most,
            system=system,
            messages=history,
            tools=tools,
            thinking={"type": "adaptive"},
            metadata={"user_id": "user_1_session_1"},
            stream=True,
            extra_query={"beta": "true"},
            extra_headers={"anthropic-beta": "interleaved-thinking-2025-05-14,context-management-2025-06-27"},
            extra_body={"speculative": {"enabled": drafts}, "context_management": {"edits": []}, **extra},
        )
        made.append(message_of([e.model_dump(mode="json") for e in events]))
        history.append({"role": "assistant", "content": made[-1]["content"]})
        history[-2] = {"role": "user", "content": new}  # the mark goes with the last message
    return made


def test_a_claude_code_like_session(server):
    sessions = [claude(server, drafts) for drafts in (True, False)]
    written = lambda b: (b["name"], b["input"]) if b["type"] == "tool_use" else b[b["type"]]
    plain = [[[(b["type"], written(b)) for b in m["content"]] for m in made] for made in sessions]
    assert plain[0] == plain[1]
    names = {"thoughts": "thinking", "text": "text", "call": "tool_use"}
    for made in sessions:
        counts = []
        for turn, message in enumerate(made):
            text, kinds = told(turn)
            if text:
                assert [b["type"] for b in message["content"]] == [names[kind] for kind in kinds]
                assert message["stop_reason"] == "tool_use"
            usage = message["usage"]
            found = usage["cache_read_input_tokens"]
            counts.append((usage["input_tokens"] + found, found, usage["output_tokens"]))
        assert decoded_again(counts) <= MOST_AGAIN, counts
