"""The server that agents call: the APIs of `api_formats.py` on this machine's loopback, a session for each rollout.

A request goes one way, with HTTP or without (`Endpoint.answer`):

    read, checked, rendered, tokenised   in a thread (`_prepare`); an error here is a 4xx
    matched with earlier requests        a retry is answered from the record (`_OpenSession.record`)
    generated                            in a task of the record, which outlives the client's connection
    delivered                            only answers that a client receives train

The session is known by the URL and its key, so a client passes nothing else along. Nothing here is imported, and
nothing listens, before an agent runs.
"""

import asyncio
import contextlib
import copy
import functools
import hashlib
import hmac
import json
import os
import secrets
import socket
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_lite.config.plugins import is_own_code
from areal_lite.config.sections import RolloutConfig
from areal_lite.network import LOOPBACK
from areal_lite.rollout.api_fields import FIELDS, Refusal
from areal_lite.rollout.api_formats import FORMATS, Format, error_event
from areal_lite.rollout.sessions import Call, Message, Parse, Placed, Session
from areal_lite.rollout.workflows import named

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_MODEL = {"id": "policy", "object": "model", "owned_by": "areal-lite"}
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
}
_RENDERERS = ThreadPoolExecutor(2, thread_name_prefix="render")
"""Requests are read, rendered and tokenised here: a long one must not block the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prepared:
    """A request that is ready to be generated."""

    format: Format
    body: dict[str, Any]
    digest: bytes
    """Of the body."""
    placed: Placed
    left_out: list[str]
    """Constraints that it asks for and does not get."""


@dataclass(slots=True, eq=False)
class _Record:
    """A request that is being answered, or was; the same request sent again gets the same answer."""

    session: Session
    request: _Prepared
    calls: "asyncio.Task[list[Call]]"
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    num_waiting: int = 0
    is_delivered: bool = False

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Count a client that waits for the answer."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def deliver(self) -> list[Call]:
        """Return the finished calls, which train from now on, as a client receives them.

        Raises:
            Refusal: They failed.
        """
        if self.calls.cancelled():
            raise Refusal(404, "the session has ended", code="session_not_found")
        is_first, self.is_delivered = not self.is_delivered, True
        if error := self.calls.exception():
            raise Refusal(500, f"{type(error).__name__}: {error}", code="generation_failed")
        if is_first:
            self.session.keep(self.calls.result())
        return self.calls.result()


@dataclass(slots=True, eq=False)
class _OpenSession:
    """A session that its URL and key open."""

    session: Session
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    records: dict[str, list[_Record]] = field(default_factory=dict)

    def record(self, api: str, request: _Prepared, *, idempotency_key: str | None, is_retry: bool) -> _Record:
        """Return the record that answers a request: an earlier one that is sent again, or a new one.

        Raises:
            Refusal: Its idempotency key belongs to another request.
        """
        known = self.records.setdefault(f"{api} {idempotency_key or request.digest.hex()}", [])
        if known and known[-1].request.digest != request.digest:
            message = "an Idempotency-Key must come with the same body each time, got another one"
            raise Refusal(422, f"{message}. Fix: use a new key for each request", code="idempotency_key_reused")
        for record in known:
            if not record.is_delivered and not record.num_waiting:
                return record
        if not known or not (idempotency_key or is_retry):
            calls = asyncio.create_task(self.session.complete(request.placed))
            known.append(_Record(self.session, request, calls))
        return known[-1]

    async def close(self) -> None:
        """Cancel everything that is still generated."""
        tasks = [record.calls for records in self.records.values() for record in records]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Endpoint:
    """A server for the sessions of one rollout worker."""

    def __init__(self, rollout: RolloutConfig, *, keep_alive_s: float = 10.0, idle_timeout_s: float = 60.0) -> None:
        """Nothing listens before `start`.

        Args:
            rollout: Names the parsers of tool calls and reasoning, and what happens to constraints.
            keep_alive_s: Seconds between the pings of a stream.
            idle_timeout_s: Seconds after which a connection with no request, or an unfinished one, is closed.
        """
        self._rollout, self._keep_alive_s, self._idle_timeout_s = rollout, keep_alive_s, idle_timeout_s
        self.unconstrained = Counter[str]()
        """Calls that were served without a constraint they asked for, by field."""
        self._sessions: dict[str, _OpenSession] = {}
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._root = ""

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """Answer a session's calls, at the URL and with the key that this yields, until the block ends."""
        name, opened = secrets.token_hex(8), _OpenSession(session)
        self._sessions[name] = opened
        try:
            yield f"{self._root}/sessions/{name}", opened.key
        finally:
            del self._sessions[name]
            await opened.close()

    async def close(self) -> None:
        """Stop the server; idempotent."""
        if self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait([self._serving])
            self._serving = None

    def start(self) -> None:
        """Listen, in the running event loop; idempotent."""
        if self._serving is not None:
            return
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        app = Starlette(
            routes=[
                Route("/sessions/{session}/v1/models", self._models, methods=["GET"]),
                Route("/sessions/{session}/v1/models/{model:path}", self._models, methods=["GET"]),
                Route("/sessions/{session}/v1/{api:path}", self._post, methods=["POST"]),
            ],
            exception_handlers={Refusal: _refused, Exception: _failed},
        )
        listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        self._root = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        # Sync clients in this process, and commands, must not ask a cluster's proxy for this address.
        direct = urllib.request.getproxies().get("no", "")
        if direct != "*" and LOOPBACK not in direct:
            os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [direct, LOOPBACK]))
        options: Any = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none"}
        options |= {"http": _protocol_with_idle_timeout(), "timeout_keep_alive": self._idle_timeout_s}
        self._server = uvicorn.Server(uvicorn.Config(app, **options))
        self._server.capture_signals = contextlib.nullcontext  # signals are the worker's business
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    @property
    def is_in_this_loop(self) -> bool:
        """Whether it listens in the running event loop; an agent may run another one in a thread."""
        return self._serving is not None and self._serving.get_loop() is asyncio.get_running_loop()

    def _open(self, name: str, key: str) -> _OpenSession:
        opened = self._sessions.get(name)
        if opened is None:
            message = "the session must still be open, got none of this name: it ends with its rollout"
            raise Refusal(404, message, code="session_not_found")
        if not hmac.compare_digest(key.encode(), opened.key.encode()):
            raise Refusal(
                401, "the API key must be this session's, got another. Fix: use llm.api_key", code="wrong_key"
            )
        return opened

    async def answer(self, name: str, key: str, api: str, raw: str | bytes) -> dict[str, Any]:
        """Answer a request that comes without HTTP, in the event loop that it listens in.

        Args:
            name: The session's, which `key` must open.
            api: The last part of the API's URL.
            raw: The body.

        Raises:
            Refusal: The request is not supported, or generation failed.
        """
        return await self._written(await self._accept(name, key, api, raw))

    async def _accept(
        self,
        name: str,
        key: str,
        api: str,
        raw: str | bytes,
        *,
        idempotency_key: str | None = None,
        is_retry: bool = False,
    ) -> _Record:
        session = self._open(name, key).session
        if len(raw) > session.max_bytes:
            message = f"a request must have at most {session.max_bytes} bytes with model.max_context, got more"
            raise Refusal(413, f"{message}. Fix: shorten the messages, or raise model.max_context", code="too_large")
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(_RENDERERS, self._prepare, session, api, raw)
        opened = self._open(name, key)  # again, as the session may have ended meanwhile
        record = opened.record(api, request, idempotency_key=idempotency_key, is_retry=is_retry)
        self.unconstrained.update(request.left_out)
        return record

    def _prepare(self, session: Session, api: str, raw: str | bytes) -> _Prepared:
        """Read a request and place it in its session's tree; runs in a thread.

        Raises:
            Refusal: The request is invalid, or not supported.
        """
        if api not in FORMATS:
            message = f"the API must be one of {', '.join([*FORMATS, 'models'])}, got {api}"
            raise Refusal(404, message, code="unknown_api")
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise ValueError(f"the body of a request must be a JSON object, got {type(body).__name__}")
            kept, left_out = FIELDS[api].checked(
                copy.deepcopy(body),  # vLLM changes some of what it reads
                temperature=session.engine.temperature,
                serve_unconstrained=self._rollout.serve_unconstrained,
            )
            asked = FORMATS[api].read(kept)
            if asked.tools and self._rollout.tool_parser is None:
                raise ValueError("tools need rollout.tool_parser, which finds tool calls in the model's text, got none")
            placed = session.place(asked)
        except Refusal:
            raise
        except Exception as error:  # of many kinds, vLLM's own included: all are about the request
            raise Refusal(400, str(error) or type(error).__name__) from error
        digest = hashlib.blake2b(json.dumps(body).encode()).digest()
        return _Prepared(format=FORMATS[api], body=body, digest=digest, placed=placed, left_out=left_out)

    async def _written(self, record: _Record) -> dict[str, Any]:
        with record.awaited():
            await asyncio.wait([record.calls])
        return record.request.format.write(record.name, record.request.body, record.deliver())

    async def _stream(self, record: _Record) -> AsyncIterator[str]:
        """Yield an answer's events, the first at once, then a ping every `keep_alive_s` while it is generated."""
        request = record.request
        with record.awaited():
            for event in request.format.opening(record.name, request.body, request.placed):
                yield event
            while not (await asyncio.wait([record.calls], timeout=self._keep_alive_s))[0]:
                yield request.format.ping
        try:
            async for event in request.format.events(record.name, request.body, record.deliver()):
                yield event
        except Refusal as refusal:
            yield error_event(_error_body(refusal))

    async def _models(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        self._open(*_name_and_key(request))
        name = request.path_params.get("model")
        return JSONResponse({"object": "list", "data": [_MODEL]} if name is None else _MODEL | {"id": name})

    async def _post(self, request: "Request") -> "Response":
        """Answer a POST, or stop waiting when its client hangs up."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        unread = Response(status_code=499)  # nobody reads it
        max_bytes, raw = self._open(*_name_and_key(request)).session.max_bytes, bytearray()
        try:
            async for chunk in request.stream():  # to its end, as clients send everything before they read
                raw += chunk[: max_bytes + 1 - len(raw)]
        except ClientDisconnect:
            return unread
        answering = asyncio.ensure_future(self._respond(request, bytes(raw)))
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
            return unread if gone.done() else answering.result()
        finally:
            answering.cancel()
            gone.cancel()

    async def _respond(self, request: "Request", raw: bytes) -> "Response":
        from starlette.responses import Response, StreamingResponse

        record = await self._accept(
            *_name_and_key(request),
            request.path_params["api"],
            raw,
            idempotency_key=request.headers.get("idempotency-key"),
            is_retry=request.headers.get("x-stainless-retry-count", "0") != "0",
        )
        if not record.request.body.get("stream"):  # `json.dumps` escapes what is not valid UTF-8
            return Response(json.dumps(await self._written(record)), media_type="application/json")
        events = self._stream(record)
        first = await anext(events)  # from here on the record has a client

        async def all_events() -> AsyncIterator[str]:
            yield first
            async for event in events:
                yield event

        return StreamingResponse(all_events(), media_type="text/event-stream")

    def parser(self, tokenizer: Any) -> Parse | None:
        """Return what separates tool calls and reasoning from text; None if the recipe names no parser."""
        tool_parser, reasoning_parser = self._rollout.tool_parser, self._rollout.reasoning_parser
        if tool_parser is None and reasoning_parser is None:
            return None
        if tool_parser and is_own_code(tool_parser):
            return functools.partial(_parse_with, named(tool_parser, kind="tool parser"))
        from vllm.parser.parser_manager import ParserManager

        parser = ParserManager.get_parser(tool_parser, reasoning_parser, enable_auto_tools=True)
        return functools.partial(_parse, parser, tokenizer)


def _parse_with(function: Callable[[str], Any], text: str, tools: Sequence[Mapping[str, Any]]) -> Message:
    content, found = function(text) if tools else (text, [])
    return _message(content, [{"name": one["name"], "arguments": json.dumps(one["arguments"])} for one in found])


def _parse(parser: Any, tokenizer: Any, text: str, tools: Sequence[Mapping[str, Any]]) -> Message:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(messages=[], tools=list(tools) or None)
    try:
        reasoning, content, calls = parser(tokenizer, request.tools).parse(text, request, enable_auto_tools=bool(tools))
    except Exception:  # some of vLLM's parsers raise if a call is malformed; others leave it in the text
        if not tools:
            raise
        return _parse(parser, tokenizer, text, ())
    return _message(content, [{"name": one.name, "arguments": one.arguments} for one in calls or ()], reasoning)


def _message(content: str | None, functions: Sequence[dict[str, str]], reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content or ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    if functions:
        message["tool_calls"] = [
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function} for function in functions
        ]
    return message


def _name_and_key(request: "Request") -> tuple[str, str]:
    key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    return request.path_params["session"], key


def _error_body(refusal: Refusal) -> dict[str, Any]:
    """Return an error in a form that the SDKs of OpenAI and Anthropic both read."""
    kind = _TYPES.get(refusal.status, "invalid_request_error")
    error = {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}
    return {"type": "error", "error": error | {"details": {"error_code": refusal.code}}}


async def _refused(_: "Request", refusal: Any) -> "Response":
    from starlette.responses import JSONResponse

    return JSONResponse(_error_body(refusal), status_code=refusal.status, headers={"x-should-retry": "false"})


async def _failed(request: "Request", error: Exception) -> "Response":
    return await _refused(request, Refusal(500, f"{type(error).__name__}: {error}", code="internal_error"))


def _protocol_with_idle_timeout() -> Any:
    """Return uvicorn's protocol, which closes idle connections after a response, also before and within a request."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class WithIdleTimeout(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._restart_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)  # stops the timer
            is_receiving = self.cycle is None or self.cycle.more_body or self.cycle.response_complete
            if is_receiving and not self.transport.is_closing():
                self._restart_timer()

        def _restart_timer(self) -> None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    return WithIdleTimeout
