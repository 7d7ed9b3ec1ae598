"""The state that the routes of all APIs share, and how each of them answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ...batching.embedder import Embedder
from ...errors import EagleError
from ..body.chat import ChatBody
from ..body.completions import CompletionBody
from ..body.fields import bounded
from ..errors import from_exception
from ..jobs.client_quota import ClientQuota
from ..jobs.gate import Gate
from ..jobs.job import Choice, RequestJob
from ..jobs.work_queue import ByteBudget, WorkQueue
from ..metrics.own import Metrics
from ..prompt.choices import ChoiceMaker
from ..settings import ServerSettings
from .access import Record
from .body_reader import BodyReader
from .held import MAX_ANSWERS, HeldResponse
from .shapes import Shape, dumps
from .stream import EventStream, respond


class Server:
    """The state that the routes share."""

    def __init__(self, settings: ServerSettings, batcher: Any) -> None:
        self.settings, self.batcher = settings, batcher
        self.name = settings.model_alias or Path(settings.model).stem
        self.quota = ClientQuota(batcher.serves_others)
        self.gate = Gate(settings.capacity, settings.n_parallel, self.quota)
        self.metrics = Metrics(batcher, self.name)
        self.bodies = BodyReader(settings.most_body)
        self.preparing = WorkQueue(2, 2 * settings.capacity, "are being prepared")
        self.tokenizing = WorkQueue(1, 8, "tokenize texts")
        self.counting = WorkQueue(2, 2 * settings.capacity, "have their tokens counted")
        self.files = WorkQueue(1, 8, "save or restore slots")
        self.answers = ByteBudget(MAX_ANSWERS, "have answers that they do not read")
        self.choices = ChoiceMaker(settings, batcher.base, self.name)
        self.embedder = Embedder(batcher, settings.embeddings) if settings.embeddings is not None else None
        self.chat_body, self.completion_body = bounded(ChatBody, settings), bounded(CompletionBody, settings)

    async def generate(
        self,
        request: Request,
        body: Any,
        chat: bool,
        shape: Any = None,
        stream_class: type[EventStream] = EventStream,
    ) -> Response:
        """Answers one completion request, whose body has been validated.

        shape, stream_class: the forms of the answer, whole and streamed, for another API than completions.
        """
        record: Record = request.scope["record"]
        record.stream = bool(body.stream)
        if self.settings.log_prompts:
            record.prompt = body.model_dump(include={"messages", "prompt"})
        prepare = self.choices.chat if chat else self.choices.completion
        choices = await self.preparing.run(prepare, body)  # in a thread: texts may be long
        job = self.job(record, choices, body, "messages" if chat else "prompt")
        return await respond(
            request,
            job,
            shape or self.shape(body, chat, record),
            stream=record.stream,
            stream_class=stream_class,
            include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
            report=body.speculative is not None and body.speculative.report,
        )

    def job(self, record: Record, choices: list[Choice], body: Any, prompt_field: str) -> RequestJob:
        """Starts the choices of a request. Raises ApiError 400 or 503."""
        record.job = RequestJob(
            batcher=self.batcher,
            gate=self.gate,
            choices=choices,
            params=self.choices.params(body.speculative),
            timeout=self.settings.timeout,
            request_id=record.request_id,
            client=record.client,
            prompt_field=prompt_field,
        )
        return record.job

    def shape(self, body: Any, chat: bool, record: Record) -> Shape:
        """The form of a completion's answer."""
        return Shape(
            chat=chat,
            answer_id=f"{'chatcmpl' if chat else 'cmpl'}-{record.request_id}",
            created=int(time.time()),
            model=self.name,
            stream=bool(body.stream),
            top_logprobs=getattr(body, "top_logprobs", None) or 0,
        )

    def count(self, body: Any) -> dict[str, Any]:
        """The answer of the routes that count a chat's tokens. Raises ApiError."""
        return {
            "object": "response.input_tokens",
            "input_tokens": self.choices.count(body, self.batcher.base),
        }

    def close(self) -> None:
        """Ends what the routes started."""
        self.choices.close()
        if self.embedder is not None:
            self.embedder.close()

    async def ask(self, work: WorkQueue, function: Any, *args: Any) -> Response:
        """Runs a blocking function and answers with its result as JSON. An EagleError becomes an ApiError."""
        try:
            return HeldResponse(await work.run(lambda: dumps(function(*args))), self.answers)
        except EagleError as e:
            raise from_exception(e, self.batcher.n_ctx, True) from e
