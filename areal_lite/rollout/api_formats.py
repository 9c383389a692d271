"""The APIs that agents speak: from the body of a request to what is asked of a session, and from calls to an answer.

Nothing here sends or generates. Requests are checked and converted by vLLM's own classes, and so are the answers of
APIs other than OpenAI's first two. A stream opens as generation begins; the rest of it is made of the finished answer,
so that no token is lost.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_lite.rollout.sessions import Asked, Call, normalised
from areal_lite.types import StopReason

Body = Mapping[str, Any]
Calls = Sequence[Call]
_DONE = "data: [DONE]\n\n"
_PING = ": generating\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One API."""

    read: Callable[[dict[str, Any]], Asked]
    """From the fields of a request that count; raises errors of many kinds where they are not valid."""
    write: Callable[[str, Body, Calls], dict[str, Any]]
    """From a name for the answer, the request's body and the calls that answer it, to the answer's body."""
    opening: Callable[[str, Body, int, int], list[str]]
    """From name, body, number of answers and of prompt tokens to the events that begin a stream."""
    events: Callable[[str, Body, Calls], AsyncIterator[str]]
    """From what `write` takes to the stream's other events."""
    ping: str = _PING
    """An event without meaning, as a sign of life."""


def _read_chat(body: Body) -> Asked:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return _of_chat(ChatCompletionRequest.model_validate(body), body["messages"])


def _of_chat(request: Any, messages: Sequence[Mapping[str, Any]]) -> Asked:
    given = request.max_completion_tokens
    return Asked(
        messages=tuple(map(normalised, messages)),
        # As vLLM gives them to the template.
        tools=tuple(tool.model_dump() for tool in request.tools or () if request.tool_choice != "none"),
        max_tokens=vars(request)["max_tokens"] if given is None else given,  # deprecated, and warned of
        stop=_stops(request.stop),
        num=1 if request.n is None else request.n,
        is_single_call=request.parallel_tool_calls is False,
    )


def _told(call: Call) -> dict[str, Any]:
    content = call.answer["content"] or (None if "tool_calls" in call.answer else "")
    return {"message": {**call.answer, "content": content, "reasoning": call.answer.get("reasoning_content")}}


def _chunk(name: str, body: Body, choices: list[dict[str, Any]], usage: Mapping[str, int] | None) -> str:
    return _event({**_head("chatcmpl", "chat.completion.chunk", name, body), "choices": choices, "usage": usage})


def _chat_opening(name: str, body: Body, num: int, num_prompt: int) -> list[str]:
    usage = _counted(num_prompt, 0) if (body.get("stream_options") or {}).get("continuous_usage_stats") else None
    delta = {"role": "assistant", "content": ""}
    choices = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(num)]
    return [_chunk(name, body, [choice], usage) for choice in choices]


async def _chat_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    answer, options = _write_chat(name, body, calls), body.get("stream_options") or {}
    usage = answer["usage"] if options.get("continuous_usage_stats") else None
    for choice in answer["choices"]:
        message = choice.pop("message")
        if tools := message.get("tool_calls"):
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(tools)]
        # Each part in a chunk of its own: some clients read only the first kind that they find in one.
        for part in (("reasoning", "reasoning_content"), ("content",), ("tool_calls",)):
            if delta := {key: message[key] for key in part if message.get(key)}:
                yield _chunk(
                    name, body, [{**choice, "finish_reason": None, "stop_reason": None, "delta": delta}], usage
                )
        yield _chunk(name, body, [{**choice, "delta": {}}], usage)
    if options.get("include_usage"):
        yield _chunk(name, body, [], answer["usage"])
    yield _DONE


def _read_completion(body: Body) -> Asked:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest.model_validate(body)
    if not isinstance(request.prompt, str) or not request.prompt:
        raise ValueError(f"a prompt must be one text, got {request.prompt!r:.60}")
    return Asked(
        prompt=request.prompt,
        max_tokens=None if body.get("max_tokens") is None else request.max_tokens,
        stop=_stops(request.stop),
        num=1 if request.n is None else request.n,
    )


async def _completion_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    yield _event(_write_completion(name, body, calls)) + _DONE


def _write(
    prefix: str, kind: str, told: Callable[[Call], dict[str, Any]], name: str, body: Body, calls: Calls
) -> dict[str, Any]:
    stops = _stops(body.get("stop"))
    return {
        **_head(prefix, kind, name, body),
        "choices": [{"index": index, **told(call), **_end(call, stops)} for index, call in enumerate(calls)],
        "usage": _usage(calls),
    }


def _head(prefix: str, kind: str, name: str, body: Body) -> dict[str, Any]:
    model = body.get("model") or "policy"
    return {"id": f"{prefix}-{name}", "object": kind, "created": int(time.time()), "model": model}


_write_chat = partial(_write, "chatcmpl", "chat.completion", _told)
_write_completion = partial(_write, "cmpl", "text_completion", lambda call: {"text": call.answer["content"]})


def _usage(calls: Calls) -> dict[str, int]:
    return _counted(len(calls[0].context), sum(call.turn.num_tokens for call in calls))


def _counted(num_prompt: int, num_own: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_own, "total_tokens": num_prompt + num_own}


def _end(call: Call, stops: Sequence[str] = ()) -> dict[str, Any]:
    has_calls, reason = bool(call.answer.get("tool_calls")), call.turn.stop_reason
    said = call.turn.text if reason is StopReason.STRING else ""
    return {
        "finish_reason": "tool_calls" if has_calls else "length" if reason is StopReason.LENGTH else "stop",
        "stop_reason": next((stop for stop in stops if stop in said), None),
        "logprobs": None,
    }


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _read_messages(body: Body) -> Asked:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    if body.get("tool_choice"):  # one whose type was left out
        body = {**body, "tool_choice": {"type": "auto", **body["tool_choice"]}}
    request = AnthropicServingMessages.to_chat_completion_request(AnthropicMessagesRequest.model_validate(body))
    return _of_chat(request, [dict(message) for message in request.messages])


def _as_chat(body: Body) -> dict[str, Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    return {"model": body["model"], "stop": body.get("stop_sequences"), "stream_options": options}


def _write_messages(name: str, body: Body, calls: Calls) -> dict[str, Any]:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    chat = ChatCompletionResponse.model_validate(_write_chat(name, _as_chat(body), calls))
    answer = AnthropicServingMessages.messages_full_converter(None, chat)  # its server is not needed for it
    return dict(answer.model_dump(mode="json", exclude_none=True))


def _messages_opening(name: str, body: Body, num: int, num_prompt: int) -> list[str]:
    message = {"id": f"chatcmpl-{name}", "type": "message", "role": "assistant", "content": [], "model": body["model"]}
    ends = {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": num_prompt, "output_tokens": 0}}
    return [_event({"type": "message_start", "message": {**message, **ends}})]


async def _messages_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    async def chunks() -> AsyncIterator[str]:
        for chunk in _chat_opening(name, chat, 1, len(calls[0].context)):
            yield chunk
        async for chunk in _chat_events(name, chat, calls):
            yield chunk

    chat = _as_chat(body)
    events = AnthropicServingMessages.message_stream_converter(None, chunks())
    await anext(events)  # its `message_start`, which was sent as the stream opened
    async for event in events:
        yield event


def _read_response(body: Body) -> Asked:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

    hosted = {tool.get("type") for tool in body.get("tools") or ()} - {"function"}
    if hosted:
        names = ", ".join(sorted(map(str, hosted)))
        raise ValueError(f"tools must be functions of the agent's own, got tools of type {names}. Fix: leave them out")
    request = ResponsesRequest.model_validate(body)
    messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    return Asked(
        messages=tuple(map(normalised, messages)),
        tools=tuple(construct_tool_dicts(request.tools, request.tool_choice, True) or ()),
        max_tokens=request.max_output_tokens,
        stop=_stops(request.stop),
        is_single_call=request.parallel_tool_calls is False,
    )


def _write_response(name: str, body: Body, calls: Calls) -> dict[str, Any]:
    return _response(name, body, calls, _items(calls))


def _response_opening(name: str, body: Body, num: int, num_prompt: int) -> list[str]:
    response = {**_response_head(name, body), "status": "in_progress", "output": [], "usage": None}
    return [_event({"type": "response.created", "response": response, "sequence_number": 0})]


async def _response_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    items = _items(calls)
    answer = _response(name, body, calls, items)
    for at, event in enumerate([*items, {"type": f"response.{answer['status']}", "response": answer}], start=1):
        yield _event({**event, "sequence_number": at})


def _items(calls: Calls) -> list[dict[str, Any]]:
    """Return the events of a response's parts."""
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta

    (answer,) = [call.answer for call in calls]
    tools = [{"index": at, **one} for at, one in enumerate(answer.get("tool_calls", ()))]
    thoughts, content = answer.get("reasoning_content"), answer["content"] or None
    said = DeltaMessage(reasoning=thoughts, content=content, tool_calls=tools)
    processor, events = SimpleStreamingEventProcessor(), list[Any]()
    for part in split_delta(said) if thoughts or content or tools else ():
        events += processor.close_current() + processor.open(*processor.resolve_target_state(part))
        events += processor.emit_delta(part, None)
    events += processor.close_current()
    if not events:  # a message with an empty text, as clients look for the first: vLLM writes one without any
        events += processor.open(*processor.resolve_target_state(DeltaMessage(content="?")))
        events += processor.close_current()
        events[-1].item.content = [events[-2].part]
    return [event.model_dump(mode="json", exclude_none=True) for event in events]


def _response(name: str, body: Body, calls: Calls, items: Sequence[Body]) -> dict[str, Any]:
    is_cut_off, usage = _end(calls[0])["finish_reason"] == "length", _usage(calls)
    return {
        **_response_head(name, body),
        "status": "incomplete" if is_cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
        "output": [event["item"] for event in items if event["type"] == "response.output_item.done"],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _response_head(name: str, body: Body) -> dict[str, Any]:
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or "policy",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
    }


def error_event(body: Body) -> str:
    """Return the event that ends a stream in the place of its answer, from an error's body."""
    error = body["error"]  # of a response's event also the fields
    return _event({**body, "message": error["message"], "code": error["code"], "param": None, "sequence_number": 1})


def _event(data: Body) -> str:
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"


FORMATS = {
    "chat/completions": Format(read=_read_chat, write=_write_chat, opening=_chat_opening, events=_chat_events),
    "messages": Format(
        read=_read_messages,
        write=_write_messages,
        opening=_messages_opening,
        events=_messages_events,
        ping=_event({"type": "ping"}),
    ),
    "responses": Format(read=_read_response, write=_write_response, opening=_response_opening, events=_response_events),
    "completions": Format(
        read=_read_completion,
        write=_write_completion,
        opening=lambda *_: [_PING],
        events=_completion_events,
    ),
}
"""By the end of their address."""
