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
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_lite.errors import EngineError
from areal_lite.network import LOOPBACK
from areal_lite.rollout.sessions import Call, ContextTooLongError, Message, Parse, Session
from areal_lite.rollout.workflows import named

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from areal_lite.rollout.api_formats import Asked

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Record:
    """A request that was taken on: whoever sends it again is answered from here."""

    calls: "asyncio.Task[list[Call]]"
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    num_waiting: int = 0
    is_delivered: bool = False


@dataclass(slots=True, eq=False)
class _Door:
    """A session as its address knows it."""

    session: Session
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    records: dict[str, list[_Record]] = field(default_factory=dict)

    def record(self, name: str, asked: "Asked", *, is_retry: bool) -> _Record:
        """Return what answers a request: a record, if it was sent before and not answered, else a new one."""
        known = self.records.setdefault(name, [])
        unanswered = [record for record in known if not record.is_delivered and not record.num_waiting]
        if unanswered or (known and is_retry):
            return unanswered[0] if unanswered else known[-1]
        known.append(_Record(asyncio.create_task(self._complete(asked))))
        return known[-1]

    async def _complete(self, asked: "Asked") -> list[Call]:
        one = {"tools": asked.tools, "max_tokens": asked.max_tokens, "stop": asked.stop}
        return list(
            await asyncio.gather(*(self.session.complete(asked.asked, **one) for _ in range(asked.num)))  # type: ignore[arg-type]
        )

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
        self.transport: Any = None
        """Takes requests of httpx's clients here without a socket; for this event loop alone."""
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

        class Server(uvicorn.Server):
            def capture_signals(self) -> Any:  # they are the worker's
                return contextlib.nullcontext()

        app = Starlette(
            routes=[
                Route("/sessions/{session}/v1/models", self._models, methods=["GET"]),
                Route("/sessions/{session}/v1/{api:path}", self._post, methods=["POST"]),
            ]
        )
        self.transport = _within_process(app)
        listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        self._root = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        self._server = Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none"))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def _models(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        if not isinstance(door := self._door(request), _Door):
            return door
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "areal-lite"}]})

    def _door(self, request: "Request") -> "_Door | Response":
        door = self._doors.get(request.path_params["session"])
        if door is None:
            return _refusal(404, "there is no such session: a rollout's ends with its agent", code="session_not_found")
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), door.key.encode()):
            return _refusal(401, "the API key must be this session's, got another: use that one", code="wrong_key")
        return door

    async def _post(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse, Response

        from areal_lite.rollout.api_formats import FORMATS, check_policy

        door = self._door(request)
        if not isinstance(door, _Door):
            return door
        api = request.path_params["api"]
        if api not in FORMATS:
            return _refusal(404, f"there is no {api}, only {', '.join([*FORMATS, 'models'])}", code="unknown_api")
        try:
            raw, form = (await request.body()).decode(), FORMATS[api]
            body, asked = dict(json.loads(raw)), form.read(json.loads(raw))  # reading may change what it reads
            check_policy(body, temperature=door.session.engine.temperature)
            if asked.tools and self._tool_parser is None:
                raise ValueError("tools need rollout.tool_parser, which finds their calls in what the model says")
        except (ValueError, KeyError, TypeError) as error:
            return _refusal(400, str(error))
        key = request.headers.get("idempotency-key")
        record = door.record(
            f"{api} {key or raw}",
            asked,
            is_retry=bool(key) or request.headers.get("x-stainless-retry-count", "0") != "0",
        )
        if not await _is_done(record, request):
            return Response(status_code=499)  # nobody reads it
        if record.calls.cancelled():
            return _refusal(404, "the session has ended", code="session_not_found")
        if (failure := record.calls.exception()) is not None:
            record.is_delivered = True
            return _told(failure)
        if not record.is_delivered:
            record.is_delivered = True
            door.session.keep(record.calls.result())
        answering = (record.name, body, record.calls.result())
        if body.get("stream"):
            events = [event async for event in form.events(*answering)]
            return Response("".join(events), media_type="text/event-stream")
        return JSONResponse(form.write(*answering))

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


def _within_process(app: Any) -> Any:
    from openai import DefaultAsyncHttpxClient

    # httpx, or httpx2: by openai's version.
    httpx: Any = importlib.import_module(str(DefaultAsyncHttpxClient.__base__.__module__))
    transport = httpx.ASGITransport(app)
    send = transport.handle_async_request

    async def send_in_time(request: Any) -> Any:
        try:
            async with asyncio.timeout(request.extensions["timeout"]["read"]):
                return await send(request)
        except TimeoutError as error:
            raise httpx.ReadTimeout("no answer within the client's timeout", request=request) from error

    transport.handle_async_request = send_in_time
    return transport


async def _is_done(record: _Record, request: "Request") -> bool:
    """Wait for the answer, while there is somebody to read it."""
    gone = asyncio.ensure_future(request.receive())
    record.num_waiting += 1
    try:
        await asyncio.wait([record.calls, gone], return_when=asyncio.FIRST_COMPLETED)
        return not gone.done()
    finally:
        record.num_waiting -= 1
        gone.cancel()


def _message(content: str | None, calls: Sequence[Mapping[str, str]], reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content or ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        named = [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": dict(one)} for one in calls]
        message["tool_calls"] = named
    return message


def _told(error: BaseException) -> "Response":
    match error:
        case ContextTooLongError():
            return _refusal(400, str(error), code="context_length_exceeded")
        case ValueError() if not isinstance(error, EngineError):
            return _refusal(400, str(error))
    return _refusal(500, f"{type(error).__name__}: {error}", code="generation_failed")


def _refusal(status: int, message: str, *, code: str = "invalid_value") -> "Response":
    """Return an error as the SDKs of OpenAI and Anthropic both read it; to send the same again would not help."""
    from starlette.responses import JSONResponse

    kind = "api_error" if status >= 500 else "authentication_error" if status == 401 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"type": "error", "error": error}, status_code=status, headers={"x-should-retry": "false"})
