"""The APIs that agents speak: from the body of a request to what it asks of a session, and from calls to an answer.

Nothing here sends or generates. vLLM's own classes check and convert requests, and write the answers of Anthropic's API
and the items of OpenAI's Responses. A stream's first events are sent as generation starts; the others are made from the
finished answer.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_lite.rollout.sessions import Asked, Call, Placed, normalised
from areal_lite.types import StopReason

Body = Mapping[str, Any]
Calls = Sequence[Call]
_DONE = "data: [DONE]\n\n"
_PING = ": generating\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One API."""

    read: Callable[[dict[str, Any]], Asked]
    """From the fields of a request that count; raises errors of many kinds if they are not valid."""
    write: Callable[[str, Body, Calls], dict[str, Any]]
    """From a name for the answer, the request's body and the calls that answer it, to the answer's body."""
    opening: Callable[[str, Body, Placed], list[str]]
    """From name, body and place to the first events of a stream."""
    events: Callable[[str, Body, Calls], AsyncIterator[str]]
    """From what `write` takes to the stream's other events."""
    ping: str = _PING
    """An event without meaning, which keeps a connection alive."""


# --- /chat/completions ---


def _read_chat(body: Body) -> Asked:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return _asked_by_chat(ChatCompletionRequest.model_validate(body), body["messages"])


def _asked_by_chat(request: Any, messages: Sequence[Mapping[str, Any]]) -> Asked:
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = vars(request)["max_tokens"]  # the attribute is deprecated, and would warn
    return Asked(
        messages=tuple(map(normalised, messages)),
        # As vLLM passes them to the template.
        tools=tuple(tool.model_dump() for tool in request.tools or () if request.tool_choice != "none"),
        max_tokens=max_tokens,
        stop=_stops(request.stop),
        num=1 if request.n is None else request.n,
        is_single_call=request.parallel_tool_calls is False,
    )


def _write_chat(name: str, body: Body, calls: Calls) -> dict[str, Any]:
    choices = []
    for index, call in enumerate(calls):
        content = call.answer["content"] or (None if "tool_calls" in call.answer else "")
        message = {**call.answer, "content": content, "reasoning": call.answer.get("reasoning_content")}
        choices.append({"index": index, "message": message, **_end(call, body)})
    return {**_head("chatcmpl", "chat.completion", name, body), "choices": choices, "usage": _usage(calls)}


def _chat_opening(name: str, body: Body, placed: Placed) -> list[str]:
    is_counted = _stream_options(body).get("continuous_usage_stats")
    usage = _counted(len(placed.context), 0) if is_counted else None
    choice = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return [_chunk(name, body, [{"index": index, **choice}], usage) for index in range(placed.asked.num)]


async def _chat_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    answer, options = _write_chat(name, body, calls), _stream_options(body)
    usage = answer["usage"] if options.get("continuous_usage_stats") else None
    for choice in answer["choices"]:
        message = choice.pop("message")
        if tools := message.get("tool_calls"):
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(tools)]
        unfinished = {**choice, "finish_reason": None, "stop_reason": None}
        # Each kind in a chunk of its own: some clients read only the first kind that they find in one.
        for kind in (("reasoning", "reasoning_content"), ("content",), ("tool_calls",)):
            if delta := {key: message[key] for key in kind if message.get(key)}:
                yield _chunk(name, body, [{**unfinished, "delta": delta}], usage)
        yield _chunk(name, body, [{**choice, "delta": {}}], usage)
    if options.get("include_usage"):
        yield _chunk(name, body, [], answer["usage"])
    yield _DONE


def _chunk(name: str, body: Body, choices: list[dict[str, Any]], usage: Mapping[str, int] | None) -> str:
    return _event({**_head("chatcmpl", "chat.completion.chunk", name, body), "choices": choices, "usage": usage})


# --- /completions ---


def _read_completion(body: Body) -> Asked:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest.model_validate(body)
    if not isinstance(request.prompt, str) or not request.prompt:
        raise ValueError(f"a prompt must be one text, got {request.prompt!r:.60}")
    return Asked(
        prompt=request.prompt,
        max_tokens=None if body.get("max_tokens") is None else request.max_tokens,  # vLLM's default is 16
        stop=_stops(request.stop),
        num=1 if request.n is None else request.n,
    )


def _write_completion(name: str, body: Body, calls: Calls) -> dict[str, Any]:
    choices = [{"index": index, "text": call.answer["content"], **_end(call, body)} for index, call in enumerate(calls)]
    return {**_head("cmpl", "text_completion", name, body), "choices": choices, "usage": _usage(calls)}


async def _completion_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    yield _event(_write_completion(name, body, calls)) + _DONE


# --- /messages ---


def _read_messages(body: Body) -> Asked:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    if body.get("tool_choice"):  # its type may have been left out as a constraint
        body = {**body, "tool_choice": {"type": "auto", **body["tool_choice"]}}
    request = AnthropicServingMessages.to_chat_completion_request(AnthropicMessagesRequest.model_validate(body))
    return _asked_by_chat(request, [dict(message) for message in request.messages])


def _as_chat(body: Body) -> dict[str, Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    return {"model": body["model"], "stop": body.get("stop_sequences"), "stream_options": options}


def _with_objects(calls: Calls) -> Calls:
    """Return calls with an object as arguments of each tool: this API has nothing else, whatever the model wrote."""
    changed = []
    for call in calls:
        functions = [tool["function"] for tool in normalised(call.answer).get("tool_calls", ())]
        tools = [
            {**tool, "function": {**function, "arguments": json.dumps(function["arguments"])}}
            for tool, function in zip(call.answer.get("tool_calls", ()), functions, strict=True)
        ]
        changed.append(replace(call, answer=call.answer | ({"tool_calls": tools} if tools else {})))
    return changed


def _write_messages(name: str, body: Body, calls: Calls) -> dict[str, Any]:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    chat = ChatCompletionResponse.model_validate(_write_chat(name, _as_chat(body), _with_objects(calls)))
    answer = AnthropicServingMessages.messages_full_converter(None, chat)  # it does not use the server, its `self`
    return dict(answer.model_dump(mode="json", exclude_none=True))


def _messages_opening(name: str, body: Body, placed: Placed) -> list[str]:
    message = {"id": f"chatcmpl-{name}", "type": "message", "role": "assistant", "content": [], "model": body["model"]}
    usage = {"input_tokens": len(placed.context), "output_tokens": 0}
    message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
    return [_event({"type": "message_start", "message": message})]


async def _messages_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    chat = _as_chat(body)

    async def chunks() -> AsyncIterator[str]:
        for chunk in _chat_opening(name, chat, calls[0].placed):
            yield chunk
        async for chunk in _chat_events(name, chat, _with_objects(calls)):
            yield chunk

    events = AnthropicServingMessages.message_stream_converter(None, chunks())
    await anext(events)  # its `message_start`, which was the opening
    async for event in events:
        yield event


# --- /responses ---


def _read_response(body: Body) -> Asked:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

    hosted = {tool.get("type") for tool in body.get("tools") or ()} - {"function", "namespace"}
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
    return _response(name, body, calls, _item_events(body, calls))


def _response_opening(name: str, body: Body, placed: Placed) -> list[str]:
    response = {**_response_head(name, body), "status": "in_progress", "output": [], "usage": None}
    return [_event({"type": "response.created", "response": response, "sequence_number": 0})]


async def _response_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    events = _item_events(body, calls)
    response = _response(name, body, calls, events)
    last = {"type": f"response.{response['status']}", "response": response}
    for number, event in enumerate([*events, last], start=1):
        yield _event({**event, "sequence_number": number})


def _item_events(body: Body, calls: Calls) -> list[dict[str, Any]]:
    """Return the events that stream a response's items: reasoning, message, tool calls."""
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta

    (answer,) = [call.answer for call in calls]
    tools = [{"index": at, **one} for at, one in enumerate(answer.get("tool_calls", ()))]
    reasoning, content = answer.get("reasoning_content"), answer["content"] or None
    delta = DeltaMessage(reasoning=reasoning, content=content, tool_calls=tools)
    known = ResponsesRequest(input="", tools=body.get("tools") or []).tools  # a call names its tool's namespace
    processor, events = SimpleStreamingEventProcessor(tools=known), list[Any]()
    for part in split_delta(delta) if reasoning or content or tools else ():
        events += processor.close_current() + processor.open(*processor.resolve_target_state(part))
        events += processor.emit_delta(part, None)
    events += processor.close_current()
    if not events:  # an empty answer is a message with an empty text, as clients read the first item; vLLM writes none
        events += processor.open(*processor.resolve_target_state(DeltaMessage(content="?")))
        events += processor.close_current()
        events[-1].item.content = [events[-2].part]
    events[-1].item.status = _status(calls)  # vLLM writes "completed" for every item
    return [event.model_dump(mode="json", exclude_none=True) for event in events]


def _response(name: str, body: Body, calls: Calls, events: Sequence[Body]) -> dict[str, Any]:
    status, usage = _status(calls), _usage(calls)
    return {
        **_response_head(name, body),
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": [event["item"] for event in events if event["type"] == "response.output_item.done"],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _status(calls: Calls) -> str:
    return "incomplete" if calls[0].turn.stop_reason is StopReason.LENGTH else "completed"


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


# --- shared ---


def _head(prefix: str, kind: str, name: str, body: Body) -> dict[str, Any]:
    model = body.get("model") or "policy"
    return {"id": f"{prefix}-{name}", "object": kind, "created": int(time.time()), "model": model}


def _end(call: Call, body: Body) -> dict[str, Any]:
    reason = call.turn.stop_reason
    text = call.turn.text if reason is StopReason.STRING else ""
    finish_reason = "tool_calls" if call.answer.get("tool_calls") else "stop"
    return {
        "finish_reason": "length" if reason is StopReason.LENGTH else finish_reason,
        "stop_reason": next((stop for stop in _stops(body.get("stop")) if stop in text), None),
        "logprobs": None,
    }


def _usage(calls: Calls) -> dict[str, int]:
    return _counted(len(calls[0].placed.context), sum(call.turn.num_tokens for call in calls))


def _counted(num_prompt: int, num_generated: int) -> dict[str, int]:
    total = num_prompt + num_generated
    return {"prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": total}


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _stream_options(body: Body) -> Body:
    return body.get("stream_options") or {}


def _event(data: Body) -> str:
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"


def error_event(body: Body) -> str:
    """Return the event that ends a stream in place of its answer, from an error's body."""
    error = body["error"]  # the Responses API wants its fields outside too
    return _event({**body, "message": error["message"], "code": error["code"], "param": None, "sequence_number": 1})


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
"""By the last part of their URL."""
