"""The routes that show what becomes of texts and chats: the prompt, its tokens, and their number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from ..body.fields import bounded
from ..errors import wrong
from ..http import openapi
from ..http.openapi import InputTokens
from .body import Content, DetokenizeBody, Prompt, TemplateBody, TokenizeBody, Tokens, piece

if TYPE_CHECKING:
    from ..http.server import Server


def add(app: FastAPI, server: Server) -> list[type[BaseModel]]:
    """Adds the routes, and returns the models of their bodies and answers."""
    template = bounded(TemplateBody, server.settings)

    @app.post("/v1/apply-template", include_in_schema=False)
    @app.post("/apply-template", **openapi.answer(Prompt, body=template))
    async def apply_template(request: Request) -> Response:
        """Returns the prompt that the model would get for a chat."""
        body = await server.bodies.read(request, template)
        return await server.ask(server.counting, _prompt, server, body)

    @app.post("/v1/chat/completions/input_tokens", **openapi.answer(InputTokens, body=server.chat_body))
    async def input_tokens(request: Request) -> Response:
        """Counts the tokens of a chat's prompt, without an answer."""
        body = await server.bodies.read(request, server.chat_body)
        return await server.ask(server.counting, server.count, body)

    @app.post("/tokenize", **openapi.answer(Tokens, body=TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Returns the token ids of a text."""
        body = await server.bodies.read(request, TokenizeBody)
        return await server.ask(server.tokenizing, _tokenize, server, body)

    @app.post("/detokenize", **openapi.answer(Content, body=DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Returns the text of token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        body = await server.bodies.read(request, DetokenizeBody)
        return await server.ask(server.tokenizing, _detokenize, server, body)

    return [template, Prompt, InputTokens, TokenizeBody, Tokens, DetokenizeBody, Content]


def _prompt(server: Server, body: TemplateBody) -> dict[str, str]:
    made = server.choices.rendered(body)
    begins = made.generation_prompt if body.add_generation_prompt is False else ""
    return {"prompt": made.prompt.removesuffix(begins)}


def _tokenize(server: Server, body: TokenizeBody) -> dict[str, Any]:
    if body.parse_special:
        server.choices.size.check_special(body.content, "content")
    base = server.batcher.base
    tokens = base.tokenize(body.content.encode(), body.add_special, body.parse_special)
    return {"tokens": [piece(t, base._bytes_of(t, True)) for t in tokens] if body.with_pieces else tokens}


def _detokenize(server: Server, body: DetokenizeBody) -> dict[str, str]:
    if max(body.tokens, default=0) >= server.choices.n_vocab:
        raise wrong("tokens", f"the model's token ids are 0..{server.choices.n_vocab - 1}")
    text = server.batcher.base.detokenize(body.tokens) if body.tokens else b""
    return {"content": text.decode("utf-8", "replace")}
