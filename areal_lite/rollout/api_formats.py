"""The APIs that agents speak: from the body of a request to what is asked of a session, and from calls to an answer.

Nothing here sends or generates. Requests are checked and converted by vLLM's own classes, and so are the answers of
APIs other than OpenAI's first two; streams are made of finished answers, so that no token is lost in them.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_lite.rollout.sessions import Asked, Call, normalised
from areal_lite.types import StopReason

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "functions": ([],),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "continue_final_message": (False,),
}
"""Settings that would sample from another policy, or another text, with the values that do not."""

Body = Mapping[str, Any]
Calls = Sequence[Call]
_DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One API."""

    read: Callable[[Mapping[str, Any]], Asked]
    """From a request's body; a `ValueError` where it is none."""
    write: Callable[[str, Body, Calls], dict[str, Any]]
    """From a name for the answer, the request's body and the calls that answer it, to the answer's body."""
    events: Callable[[str, Body, Calls], AsyncIterator[str]]
    """From the same to the events of a stream that says the same."""


def check_policy(body: Mapping[str, Any], *, temperature: float) -> None:
    """Refuse what would sample from another policy than the one that trains; a greedy one ignores temperatures.

    Raises:
        ValueError: It names the setting.
    """
    allowed = {**_NEUTRAL, "temperature": (temperature,)} if temperature else _NEUTRAL
    for name, values in allowed.items():
        if (value := body.get(name)) is not None and value not in values:
            raise ValueError(
                f"calls are sampled with rollout.temperature={temperature:g} alone, as that is the policy that trains; "
                f"got {name}={value!r}: leave it out"
                + (", or set rollout.temperature" if name == "temperature" else "")
            )


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
    )


def _told(call: Call) -> dict[str, Any]:
    content = call.answer["content"] or (None if "tool_calls" in call.answer else "")
    return {"message": {**call.answer, "content": content, "reasoning": call.answer.get("reasoning_content")}}


async def _chat_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    answer, options = _write_chat(name, body, calls), body.get("stream_options") or {}
    usage = answer["usage"] if options.get("continuous_usage_stats") else None

    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        return _event({**answer, "object": "chat.completion.chunk", "choices": choices, "usage": usage, **more})

    for choice in answer["choices"]:
        message = choice.pop("message")
        if tools := message.get("tool_calls"):
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(tools)]
        empty = {**choice, "finish_reason": None, "stop_reason": None}
        yield chunk([{**empty, "delta": {"role": message.pop("role"), "content": ""}}])
        yield chunk([{**empty, "delta": message}])
        yield chunk([{**choice, "delta": {}}])
    if options.get("include_usage"):
        yield chunk([], usage=answer["usage"])
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
        "id": f"{prefix}-{name}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or "policy",
        "choices": [{"index": index, **told(call), **_end(call, stops)} for index, call in enumerate(calls)],
        "usage": _usage(calls),
    }


_write_chat = partial(_write, "chatcmpl", "chat.completion", _told)
_write_completion = partial(_write, "cmpl", "text_completion", lambda call: {"text": call.answer["content"]})


def _usage(calls: Calls) -> dict[str, int]:
    num_prompt, num_own = len(calls[0].context), sum(call.turn.num_tokens for call in calls)
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


def _messages_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    chunks = _chat_events(name, _as_chat(body), calls)
    return AnthropicServingMessages.message_stream_converter(None, chunks)  # type: ignore[no-any-return]


def _read_response(body: Body) -> Asked:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

    for name in ("previous_response_id", "conversation", "background"):
        if body.get(name):
            raise ValueError(f"nothing is stored between calls, got {name}={body[name]!r}: send the whole input again")
    request = ResponsesRequest.model_validate(body)
    if ((body.get("text") or {}).get("format") or {}).get("type", "text") != "text":
        raise ValueError("text.format must be text: any other would sample from another policy")
    messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    return Asked(
        messages=tuple(map(normalised, messages)),
        tools=tuple(construct_tool_dicts(request.tools, request.tool_choice, True) or ()),
        max_tokens=request.max_output_tokens,
    )


def _write_response(name: str, body: Body, calls: Calls) -> dict[str, Any]:
    return _response(name, body, calls, _items(calls))


async def _response_events(name: str, body: Body, calls: Calls) -> AsyncIterator[str]:
    items = _items(calls)
    answer = _response(name, body, calls, items)
    begun = {"type": "response.created", "response": {**answer, "status": "in_progress", "output": []}}
    events = [begun, *items, {"type": f"response.{answer['status']}", "response": answer}]
    for at, event in enumerate(events):
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
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or "policy",
        "status": "incomplete" if is_cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
        "output": [event["item"] for event in items if event["type"] == "response.output_item.done"],
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _event(data: Body) -> str:
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"


FORMATS = {
    "chat/completions": Format(read=_read_chat, write=_write_chat, events=_chat_events),
    "messages": Format(read=_read_messages, write=_write_messages, events=_messages_events),
    "responses": Format(read=_read_response, write=_write_response, events=_response_events),
    "completions": Format(read=_read_completion, write=_write_completion, events=_completion_events),
}
"""By the end of their address."""
