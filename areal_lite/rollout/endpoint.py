"""The endpoint that agents call: an OpenAI-compatible API on this machine's loopback, with a session for each rollout.

Nothing of it is imported or listens where no agent runs. The session in an address and its key, which no other session
takes, are all that a client needs: what is generated is captured here.
"""

import asyncio
import contextlib
import functools
import hashlib
import hmac
import importlib
import json
import logging
import os
import secrets
import socket
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_lite.config.sections import RolloutConfig
from areal_lite.errors import EngineError
from areal_lite.network import LOOPBACK
from areal_lite.rollout.api_fields import FIELDS, UnsupportedFieldError
from areal_lite.rollout.sessions import RENDERERS, Asked, Call, ContextTooLongError, Message, Parse, Placed, Session
from areal_lite.rollout.workflows import named

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from areal_lite.rollout.api_formats import Format

logger = logging.getLogger(__name__)

_SMALL_BYTES = 2**16
_MODEL = {"id": "policy", "object": "model", "owned_by": "areal-lite"}
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
}


class Refusal(Exception):
    """What is sent in the place of an answer; to send the same request again would not help."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(f"{message:.1000}")  # it may quote what was sent
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """Return it as the SDKs of OpenAI and Anthropic both read it."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return {"type": "error", "error": error | {"details": {"error_code": self.code}}}


@dataclass(slots=True, eq=False)
class _Record:
    """A request that was accepted; the same request sent again is answered from here."""

    session: Session
    asked: Asked
    digest: bytes
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    num_waiting: int = 0
    is_delivered: bool = False
    placed: "asyncio.Future[Placed]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done as generation begins."""
    calls: "asyncio.Task[list[Call]]" = field(init=False)

    def __post_init__(self) -> None:
        self.calls = asyncio.create_task(self._run())

    async def _run(self) -> list[Call]:
        try:
            self.placed.set_result(await self.session.place(self.asked))
        except Exception as error:  # its frames would keep the text and its tokens as long as the session
            raise error.with_traceback(None) from None
        return await self.session.complete(self.placed.result())

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Note that a client waits for the answer."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def deliver(self) -> list[Call]:
        """Return the calls, which train from now on: a client gets them.

        Raises:
            Refusal: There are none.
        """
        if self.calls.cancelled():
            raise Refusal(404, "the session has ended", code="session_not_found")
        failure = self.calls.exception()
        if failure is None and not self.is_delivered:
            self.session.keep(self.calls.result())
        self.is_delivered = True
        if failure is not None:
            raise _told(failure)
        return self.calls.result()


@dataclass(slots=True, eq=False)
class _Door:
    """A session as its address knows it."""

    session: Session
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    records: dict[str, list[_Record]] = field(default_factory=dict)

    def record(self, api: str, asked: Asked, digest: bytes, *, again: str | None, is_retry: bool) -> _Record:
        """Return what answers a request: a record, if it was sent before and not answered, else a new one."""
        known = self.records.setdefault(f"{api} {again or digest.hex()}", [])
        if known and known[-1].digest != digest:
            message = "an Idempotency-Key must come with the request that it came with before, got another body"
            raise Refusal(422, f"{message}. Fix: use a new key for each request", code="idempotency_key_reused")
        unanswered = [record for record in known if not record.is_delivered and not record.num_waiting]
        if not unanswered and not (known and (again or is_retry)):
            known.append(_Record(self.session, asked, digest))
        return unanswered[0] if unanswered else known[-1]

    async def close(self) -> None:
        """End all that is still generated."""
        tasks = [record.calls for records in self.records.values() for record in records]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Endpoint:
    """A server for the sessions of one rollout worker; it listens once it is started."""

    def __init__(
        self,
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        serve_unconstrained: bool = False,
        keep_alive_s: float = 10.0,
        idle_timeout_s: float = 60.0,
    ) -> None:
        """Prepare.

        Args:
            tool_parser: A name of vLLM's tool parsers, or `module:function` or `path.py:function` of one that turns a
                text into `(content, [{"name": ..., "arguments": {...}}, ...])`; None = the model calls no tools.
            reasoning_parser: A name of vLLM's reasoning parsers.
            serve_unconstrained: Leave out what would sample from another policy, in place of a refusal.
            keep_alive_s: Seconds between the signs of life of a stream.
            idle_timeout_s: Seconds after which a connection without a request, or with a part of one, is closed.
        """
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._serve_unconstrained, self._keep_alive_s = serve_unconstrained, keep_alive_s
        self._idle_timeout_s = idle_timeout_s
        self.unconstrained = Counter[str]()
        """Calls that were served without a constraint they asked for, by its field."""
        self._doors: dict[str, _Door] = {}
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._root = ""
        self._starting = asyncio.Lock()

    @classmethod
    def of(cls, rollout: RolloutConfig) -> "Endpoint":
        """Return the endpoint that a recipe describes."""
        return cls(
            tool_parser=rollout.tool_parser,
            reasoning_parser=rollout.reasoning_parser,
            serve_unconstrained=rollout.serve_unconstrained,
        )

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
                Route("/sessions/{session}/v1/models/{model:path}", self._model, methods=["GET"]),
                Route("/sessions/{session}/v1/{api:path}", self._post, methods=["POST"]),
            ],
            exception_handlers={Refusal: _refused, Exception: _failed},
        )
        listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        self._root = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        # Sync clients in this process, and commands, must not look for it behind a cluster's proxy.
        direct = urllib.request.getproxies().get("no", "")
        if direct != "*" and LOOPBACK not in direct:
            os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [direct, LOOPBACK]))
        options: Any = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none"}
        options |= {"http": _impatient(), "timeout_keep_alive": self._idle_timeout_s}
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
    ) -> dict[str, Any]:
        """Answer a request by a body, to be JSON.

        Args:
            name: Of the session, which the key must open.
            api: The end of its address.
            raw: Its body.
            again: What is the same where a request is sent again; None = its body.

        Raises:
            Refusal: It is not answered.
        """
        return await self._written(*await self._record(name, key, api, raw, again=again, is_retry=is_retry))

    async def _written(self, form: "Format", body: dict[str, Any], record: _Record) -> dict[str, Any]:
        with record.awaited():
            await asyncio.wait([record.calls])
        return form.write(record.name, body, record.deliver())

    async def _stream(self, form: "Format", body: dict[str, Any], record: _Record) -> AsyncIterator[str]:
        """Yield the events of an answer, and signs of life while it is generated; only the first may raise."""
        from areal_lite.rollout.api_formats import error_event

        with record.awaited():
            either: list[asyncio.Future[Any]] = [record.placed, record.calls]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not record.placed.done():
                record.deliver()  # it failed
            for event in form.opening(record.name, body, record.asked.num, len(record.placed.result().context)):
                yield event
            while not (await asyncio.wait([record.calls], timeout=self._keep_alive_s))[0]:
                yield form.ping
        try:
            async for event in form.events(record.name, body, record.deliver()):
                yield event
        except Refusal as refusal:
            yield error_event(refusal.body())

    async def _record(
        self, name: str, key: str, api: str, raw: str | bytes, *, again: str | None, is_retry: bool
    ) -> tuple["Format", dict[str, Any], _Record]:
        """Read a request, and return what answers it."""
        session = self._door(name, key).session
        if len(raw) > session.max_bytes:
            message = f"a request must have at most {session.max_bytes} bytes with model.max_context, got more"
            raise Refusal(413, f"{message}. Fix: shorten the messages, or raise model.max_context", code="too_large")
        read = functools.partial(self._read, api, raw, temperature=session.engine.temperature)
        is_small = len(raw) < _SMALL_BYTES
        given = read() if is_small else await asyncio.get_running_loop().run_in_executor(RENDERERS, read)
        form, body, asked, left_out = given
        digest = hashlib.blake2b(json.dumps(body).encode()).digest()
        record = self._door(name, key).record(api, asked, digest, again=again, is_retry=is_retry)
        self.unconstrained.update(left_out)
        return form, body, record

    def _read(
        self, api: str, raw: str | bytes, *, temperature: float
    ) -> tuple["Format", dict[str, Any], Asked, list[str]]:
        from areal_lite.rollout.api_formats import FORMATS

        if api not in FORMATS:
            raise Refusal(404, f"there is no {api}, only {', '.join([*FORMATS, 'models'])}", code="unknown_api")
        try:
            form, body = FORMATS[api], json.loads(raw)
            if not isinstance(body, dict):
                raise ValueError(f"the body of a request must be a JSON object, got {type(body).__name__}")
            counting, left_out = FIELDS[api].checked(
                json.loads(raw),  # reading may change what it reads
                temperature=temperature,
                serves_unconstrained=self._serve_unconstrained,
            )
            asked = form.read(counting)
            if asked.tools and self._tool_parser is None:
                raise ValueError("tools need rollout.tool_parser, which finds their calls in what the model says")
        except UnsupportedFieldError as error:
            code = "thread_unsupported_request" if error.name == "thread" else "unsupported_parameter"
            raise Refusal(400, str(error), code=code) from error
        except Exception as error:  # of many kinds, vLLM's own included: the body alone decides
            raise Refusal(400, str(error) or type(error).__name__) from error
        return form, body, asked, left_out

    async def _models(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        self._door(*_opened(request))
        return JSONResponse({"object": "list", "data": [_MODEL]})

    async def _model(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        self._door(*_opened(request))
        return JSONResponse(_MODEL | {"id": request.path_params["model"]})

    async def _post(self, request: "Request") -> "Response":
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        try:
            raw = await self._body(request, self._door(*_opened(request)).session.max_bytes)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        answering, gone = asyncio.ensure_future(self._respond(request, raw)), asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
            return Response(status_code=499) if gone.done() else answering.result()
        finally:
            answering.cancel()
            gone.cancel()

    async def _body(self, request: "Request", max_bytes: int) -> bytes:
        """Return at most one byte more than there may be; what follows is dropped, as clients send all, then read."""
        body, clock = bytearray(), asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._idle_timeout_s) as idle:
                async for chunk in request.stream():
                    body += chunk[: max_bytes + 1 - len(body)]
                    idle.reschedule(clock() + self._idle_timeout_s)
        except TimeoutError:
            message = f"a request's body must not pause for {self._idle_timeout_s:g} s. Fix: send it at once"
            raise Refusal(408, message, code="timeout") from None
        return bytes(body)

    async def _respond(self, request: "Request", raw: bytes) -> "Response":
        from starlette.responses import Response, StreamingResponse

        again, is_retry = request.headers.get("idempotency-key"), request.headers.get("x-stainless-retry-count", "0")
        api = request.path_params["api"]
        form, body, record = await self._record(*_opened(request), api, raw, again=again, is_retry=is_retry != "0")
        if not body.get("stream"):  # in JSON, what is no UTF-8 is escaped
            return Response(json.dumps(await self._written(form, body, record)), media_type="application/json")
        events = self._stream(form, body, record)
        first = await anext(events)  # what raises does so while there still can be a status

        async def all_events() -> AsyncIterator[str]:
            yield first
            async for event in events:
                yield event

        return StreamingResponse(all_events(), media_type="text/event-stream")

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
    from starlette.responses import JSONResponse

    return JSONResponse(refusal.body(), status_code=refusal.status, headers={"x-should-retry": "false"})


async def _failed(request: "Request", error: Exception) -> "Response":
    return await _refused(request, _told(RuntimeError(f"{type(error).__name__}: {error}")))


def _impatient() -> Any:
    """Return uvicorn's protocol, which also closes connections on which no request starts or continues."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Impatient(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
                self._wait()

        def _wait(self) -> None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    return Impatient
