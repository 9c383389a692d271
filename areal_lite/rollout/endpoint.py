"""The endpoint that agents call: an OpenAI-compatible API on this machine's loopback, with a session for each rollout.

Nothing of it is imported or listens where no agent runs. The session in an address and its key, which no other session
takes, are all that a client needs: what is generated is captured here.
"""

import asyncio
import contextlib
import functools
import hmac
import importlib
import json
import logging
import os
import secrets
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_lite.errors import EngineError
from areal_lite.network import LOOPBACK
from areal_lite.rollout.sessions import Asked, Call, ContextTooLongError, Message, Parse, Session
from areal_lite.rollout.workflows import named

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)


class Refusal(Exception):
    """What is told in the place of an answer; to send the same again would not help."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(slots=True, eq=False)
class _Record:
    """A request that was taken on: whoever sends it again is answered from here."""

    calls: "asyncio.Future[list[Call]]"
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    num_waiting: int = 0
    is_delivered: bool = False


@dataclass(slots=True, eq=False)
class _Door:
    """A session as its address knows it."""

    session: Session
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    records: dict[str, list[_Record]] = field(default_factory=dict)

    def record(self, name: str, asked: Asked, *, is_retry: bool) -> _Record:
        """Return what answers a request: a record, if it was sent before and not answered, else a new one."""
        known = self.records.setdefault(name, [])
        unanswered = [record for record in known if not record.is_delivered and not record.num_waiting]
        if unanswered or (known and is_retry):
            return unanswered[0] if unanswered else known[-1]
        calls = (self.session.complete(asked) for _ in range(asked.num))
        known.append(_Record(asyncio.gather(*calls)))
        return known[-1]

    async def close(self) -> None:
        """End all that is still generated."""
        tasks = [record.calls for records in self.records.values() for record in records]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Endpoint:
    """A server for the sessions of one rollout worker; it listens once it is started."""

    def __init__(self, *, tool_parser: str | None = None, reasoning_parser: str | None = None) -> None:
        """Prepare.

        Args:
            tool_parser: A name of vLLM's tool parsers, or `module:function` or `path.py:function` of one that turns a
                text into `(content, [{"name": ..., "arguments": {...}}, ...])`; None = the model calls no tools.
            reasoning_parser: A name of vLLM's reasoning parsers.
        """
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._doors: dict[str, _Door] = {}
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._root = ""
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """Answer the calls of a session, at the address and with the key that this yields, until its block ends."""
        name, door = secrets.token_hex(8), _Door(session)
        self._doors[name] = door
        try:
            yield f"{self._root}/sessions/{name}", door.key
        finally:
            del self._doors[name]
            await door.close()

    async def close(self) -> None:
        """End the server; idempotent."""
        if self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait([self._serving])
            self._serving = None

    async def start(self) -> None:
        """Listen; idempotent."""
        async with self._starting:
            if self._serving is None:
                await asyncio.to_thread(importlib.import_module, "vllm.entrypoints.openai.chat_completion.protocol")
                self._listen()

    def _listen(self) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        app = Starlette(
            routes=[
                Route("/sessions/{session}/v1/models", self._models, methods=["GET"]),
                Route("/sessions/{session}/v1/{api:path}", self._post, methods=["POST"]),
            ],
            exception_handlers={Refusal: _refused},
        )
        listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        self._root = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        # Sync clients in this process, and commands, must not look for it behind a cluster's proxy.
        direct = urllib.request.getproxies().get("no", "")
        if direct != "*" and LOOPBACK not in direct:
            os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [direct, LOOPBACK]))
        options: Any = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none"}
        self._server = uvicorn.Server(uvicorn.Config(app, **options))
        self._server.capture_signals = contextlib.nullcontext  # they are the worker's
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    def _door(self, name: str, key: str) -> _Door:
        door = self._doors.get(name)
        if door is None:
            raise Refusal(404, "there is no such session: a rollout's ends with its agent", code="session_not_found")
        if not hmac.compare_digest(key.encode(), door.key.encode()):
            raise Refusal(401, "the API key must be this session's, got another: use that one", code="wrong_key")
        return door

    async def answer(
        self, name: str, key: str, api: str, raw: str | bytes, *, again: str | None = None, is_retry: bool = False
    ) -> Any:
        """Answer a request: a body, to be JSON, or the text of a stream's events where one is asked for.

        Args:
            name: Of the session, which the key must open.
            api: The end of its address.
            raw: Its body.
            again: What is the same where a request is sent again; None = its body.

        Raises:
            Refusal: It is not answered.
        """
        from areal_lite.rollout.api_formats import FORMATS, check_policy

        door = self._door(name, key)
        if api not in FORMATS:
            raise Refusal(404, f"there is no {api}, only {', '.join([*FORMATS, 'models'])}", code="unknown_api")
        try:
            form, body = FORMATS[api], json.loads(raw)
            if not isinstance(body, dict):
                raise ValueError(f"the body of a request must be a JSON object, got {type(body).__name__}")
            request = f"{api} {again or json.dumps(body)}"
            asked = form.read(json.loads(raw))  # reading may change what it reads
            check_policy(body, temperature=door.session.engine.temperature)
            if asked.tools and self._tool_parser is None:
                raise ValueError("tools need rollout.tool_parser, which finds their calls in what the model says")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:  # of vLLM's readers too
            raise Refusal(400, str(error)) from error
        record = door.record(request, asked, is_retry=bool(again) or is_retry)
        record.num_waiting += 1
        try:
            await asyncio.wait([record.calls])
        finally:
            record.num_waiting -= 1
        if record.calls.cancelled():
            raise Refusal(404, "the session has ended", code="session_not_found")
        if (failure := record.calls.exception()) is not None:
            record.is_delivered = True
            raise _told(failure)
        if not record.is_delivered:
            record.is_delivered = True
            door.session.keep(record.calls.result())
        answering = (record.name, body, record.calls.result())
        if body.get("stream"):
            return "".join([event async for event in form.events(*answering)])
        return form.write(*answering)

    async def _models(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        self._door(*_opened(request))
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "areal-lite"}]})

    async def _post(self, request: "Request") -> "Response":
        from starlette.responses import Response

        raw, headers = await request.body(), request.headers
        again, is_retry = headers.get("idempotency-key"), headers.get("x-stainless-retry-count", "0") != "0"
        asked = self.answer(*_opened(request), request.path_params["api"], raw, again=again, is_retry=is_retry)
        answering, gone = asyncio.ensure_future(asked), asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return Response(status_code=499)  # nobody reads it
            answer = answering.result()
            if isinstance(answer, str):
                return Response(answer, media_type="text/event-stream")
            return Response(json.dumps(answer), media_type="application/json")  # what is no UTF-8 is escaped
        finally:
            answering.cancel()
            gone.cancel()

    def parser(self, tokenizer: Any) -> Parse | None:
        """Return what takes tool calls and reasoning apart; None where the recipe names no parser."""
        names = (self._tool_parser, self._reasoning_parser)
        if names == (None, None):
            return None
        if self._tool_parser and ":" in self._tool_parser:
            return functools.partial(_parse_with, named(self._tool_parser, kind="tool parser"))
        from vllm.parser.parser_manager import ParserManager

        return functools.partial(_parse, ParserManager.get_parser(*names, enable_auto_tools=True), tokenizer)


def _parse_with(function: Callable[[str], Any], text: str, tools: Sequence[Mapping[str, Any]]) -> Message:
    content, found = function(text) if tools else (text, [])
    return _message(content, [{"name": one["name"], "arguments": json.dumps(one["arguments"])} for one in found])


def _parse(parser: Any, tokenizer: Any, text: str, tools: Sequence[Mapping[str, Any]]) -> Message:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(messages=[], tools=list(tools) or None)
    reasoning, content, calls = parser(tokenizer, request.tools).parse(text, request, enable_auto_tools=bool(tools))
    return _message(content, [{"name": one.name, "arguments": one.arguments} for one in calls or ()], reasoning)


def _opened(request: "Request") -> tuple[str, str]:
    """Return the name and the key of the session that a request is for."""
    key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    return request.path_params["session"], key


def _message(content: str | None, calls: Sequence[Mapping[str, str]], reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content or ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        named = [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": dict(one)} for one in calls]
        message["tool_calls"] = named
    return message


def _told(error: BaseException) -> Refusal:
    match error:
        case ContextTooLongError():
            return Refusal(400, str(error), code="context_length_exceeded")
        case ValueError() if not isinstance(error, EngineError):
            return Refusal(400, str(error))
    return Refusal(500, f"{type(error).__name__}: {error}", code="generation_failed")


async def _refused(_: "Request", refusal: Any) -> "Response":
    """Return a refusal as the SDKs of OpenAI and Anthropic both read it."""
    from starlette.responses import JSONResponse

    kind = {401: "authentication_error", 500: "api_error"}.get(refusal.status, "invalid_request_error")
    error = {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}
    body = {"type": "error", "error": error}
    return JSONResponse(body, status_code=refusal.status, headers={"x-should-retry": "false"})
