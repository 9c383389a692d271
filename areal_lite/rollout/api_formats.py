"""The APIs that agents speak: from the body of a request to what is asked of a session, and from calls to an answer.

Nothing here sends or generates. Requests are checked and converted by vLLM's own classes; streams are made of finished
answers, so that no token is lost in them.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from areal_lite.rollout.sessions import Call
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
}
"""Settings that would sample from another policy, with the values that do not."""

Event = tuple[str | None, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks of a session."""

    asked: Sequence[Mapping[str, Any]] | str
    """Messages, or plain text."""
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num: int = 1
    """How many answers."""

    def __post_init__(self) -> None:
        if self.num < 1 or (self.max_tokens or 1) < 1:
            raise ValueError(f"n and max_tokens must be at least 1, got {self.num} and {self.max_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One API."""

    read: Callable[[Mapping[str, Any]], Asked]
    """From a request's body; a `ValueError` where it is none."""
    write: Callable[[str, Mapping[str, Any], Sequence[Call]], dict[str, Any]]
    """From a name for the answer, the request's body and the calls that answer it, to the answer's body."""
    events: Callable[[dict[str, Any], Mapping[str, Any]], Iterable[Event]]
    """From the answer's body and the request's to the events, with their names, of a stream that says the same."""


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


def _read_chat(body: Mapping[str, Any]) -> Asked:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return _of_chat(ChatCompletionRequest.model_validate(body), body["messages"], max_tokens=body.get("max_tokens"))


def _of_chat(request: Any, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None) -> Asked:
    return Asked(
        asked=messages,
        # As vLLM gives them to the template.
        tools=tuple(tool.model_dump() for tool in request.tools or () if request.tool_choice != "none"),
        max_tokens=request.max_completion_tokens or max_tokens,
        stop=_stops(request.stop),
        num=1 if request.n is None else request.n,
    )


def _write_chat(name: str, body: Mapping[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {
                **call.answer,
                "content": call.answer["content"] or (None if "tool_calls" in call.answer else ""),
            },
            "finish_reason": _finish(call),
            "logprobs": None,
        }
        for index, call in enumerate(calls)
    ]
    return _answer("chatcmpl", "chat.completion", name, body, calls, choices)


def _chat_events(answer: dict[str, Any], body: Mapping[str, Any]) -> Iterable[Event]:
    def chunk(choices: list[dict[str, Any]], **more: Any) -> Event:
        return None, {**answer, "object": "chat.completion.chunk", "choices": choices, "usage": None, **more}

    for choice in answer["choices"]:
        index, message = choice["index"], choice["message"]
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}
        yield chunk([{"index": index, "delta": message, "finish_reason": None}])
        yield chunk([{"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield chunk([], usage=answer["usage"])


def _read_completion(body: Mapping[str, Any]) -> Asked:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest.model_validate(body)
    if not isinstance(request.prompt, str) or not request.prompt:
        raise ValueError(f"a prompt must be one text, got {request.prompt!r:.60}")
    return Asked(
        asked=request.prompt,
        max_tokens=body.get("max_tokens"),
        stop=_stops(request.stop),
        num=1 if request.n is None else request.n,
    )


def _write_completion(name: str, body: Mapping[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
    choices = [
        {"index": index, "text": call.answer["content"], "finish_reason": _finish(call), "logprobs": None}
        for index, call in enumerate(calls)
    ]
    return _answer("cmpl", "text_completion", name, body, calls, choices)


def _completion_events(answer: dict[str, Any], body: Mapping[str, Any]) -> Iterable[Event]:
    yield None, answer


def _answer(
    prefix: str, kind: str, name: str, body: Mapping[str, Any], calls: Sequence[Call], choices: list[dict[str, Any]]
) -> dict[str, Any]:
    num_prompt, num_own = len(calls[0].context), sum(call.turn.num_tokens for call in calls)
    return {
        "id": f"{prefix}-{name}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or "policy",
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_own,
            "total_tokens": num_prompt + num_own,
        },
    }


def _finish(call: Call) -> str:
    if call.answer.get("tool_calls"):
        return "tool_calls"
    return "length" if call.turn.stop_reason is StopReason.LENGTH else "stop"


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _read_messages(body: Mapping[str, Any]) -> Asked:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    request = AnthropicServingMessages.to_chat_completion_request(AnthropicMessagesRequest.model_validate(body))
    return _of_chat(request, [dict(message) for message in request.messages], max_tokens=None)


def _write_messages(name: str, body: Mapping[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
    ((call, answer),) = [(call, call.answer) for call in calls]
    ends = [end for end in body.get("stop_sequences") or () if end in call.turn.text]
    content: list[dict[str, Any]] = []
    if thoughts := answer.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thoughts, "signature": name})
    if answer["content"] or not answer.get("tool_calls"):
        content.append({"type": "text", "text": answer["content"]})
    for one in answer.get("tool_calls", ()):
        function = one["function"]
        arguments = json.loads(function["arguments"])
        content.append({"type": "tool_use", "id": one["id"], "name": function["name"], "input": arguments})
    is_string = call.turn.stop_reason is StopReason.STRING
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "stop_sequence" if is_string else "end_turn"}
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": content,
        "stop_reason": reasons[_finish(call)],
        "stop_sequence": ends[0] if is_string and ends else None,
        "usage": {"input_tokens": len(call.context), "output_tokens": call.turn.num_tokens},
    }


def _messages_events(answer: dict[str, Any], body: Mapping[str, Any]) -> Iterable[Event]:
    def event(kind: str, **data: Any) -> Event:
        return kind, {"type": kind, **data}

    begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
    yield event("message_start", message={**begun, "usage": {**answer["usage"], "output_tokens": 0}})
    for index, block in enumerate(answer["content"]):
        empty: dict[str, Any]
        match block:
            case {"type": "text", "text": text}:
                empty, deltas = {"text": ""}, [{"type": "text_delta", "text": text}]
            case {"type": "thinking", "thinking": text}:
                signature = {"type": "signature_delta", "signature": block["signature"]}
                empty, deltas = (
                    {"thinking": "", "signature": ""},
                    [{"type": "thinking_delta", "thinking": text}, signature],
                )
            case _:
                written = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                empty, deltas = {"input": {}}, [written]
        yield event("content_block_start", index=index, content_block={**block, **empty})
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    end = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    yield event("message_delta", delta=end, usage=answer["usage"])
    yield event("message_stop")


def _read_response(body: Mapping[str, Any]) -> Asked:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

    for name in ("previous_response_id", "conversation", "background"):
        if body.get(name):
            raise ValueError(f"nothing is stored between calls, got {name}={body[name]!r}: send the whole input again")
    if ((body.get("text") or {}).get("format") or {}).get("type", "text") != "text":
        raise ValueError("text.format must be text: any other would sample from another policy")
    request = ResponsesRequest.model_validate(body)
    return Asked(
        asked=construct_input_messages(request_instructions=request.instructions, request_input=request.input),
        tools=tuple(construct_tool_dicts(request.tools, request.tool_choice, True) or ()),
        max_tokens=request.max_output_tokens,
    )


def _write_response(name: str, body: Mapping[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
    ((call, answer),) = [(call, call.answer) for call in calls]
    output: list[dict[str, Any]] = []
    if thoughts := answer.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thoughts}]
        output.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    if answer["content"] or not answer.get("tool_calls"):
        part = {"type": "output_text", "text": answer["content"], "annotations": []}
        said = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": [part]}
        output.append(said)
    for number, one in enumerate(answer.get("tool_calls", ())):
        made = {"type": "function_call", "id": f"fc_{number}_{name}", "call_id": one["id"], "status": "completed"}
        output.append({**made, **one["function"]})
    is_cut_off = _finish(call) == "length"
    num_prompt, num_own = len(call.context), call.turn.num_tokens
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or "policy",
        "status": "incomplete" if is_cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": num_prompt,
            "output_tokens": num_own,
            "total_tokens": num_prompt + num_own,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _response_events(answer: dict[str, Any], body: Mapping[str, Any]) -> Iterable[Event]:
    numbers = count()

    def event(kind: str, **data: Any) -> Event:
        return f"response.{kind}", {"type": f"response.{kind}", "sequence_number": next(numbers), **data}

    yield event("created", response={**answer, "status": "in_progress", "output": []})
    for index, item in enumerate(answer["output"]):
        place = {"item_id": item["id"], "output_index": index}
        match item["type"]:
            case "message":
                (part,) = item["content"]
                place["content_index"] = 0
                yield event("output_item.added", output_index=index, item={**item, "content": []})
                yield event("content_part.added", **place, part={**part, "text": ""})
                yield event("output_text.delta", **place, delta=part["text"], logprobs=[])
                yield event("output_text.done", **place, text=part["text"], logprobs=[])
                yield event("content_part.done", **place, part=part)
            case "function_call":
                written = {"arguments": item["arguments"], "name": item["name"]}
                yield event("output_item.added", output_index=index, item={**item, "arguments": ""})
                yield event("function_call_arguments.delta", **place, delta=item["arguments"])
                yield event("function_call_arguments.done", **place, **written)
            case _:
                yield event("output_item.added", output_index=index, item=item)
        yield event("output_item.done", output_index=index, item=item)
    yield event(answer["status"], response=answer)


FORMATS = {
    "chat/completions": Format(read=_read_chat, write=_write_chat, events=_chat_events),
    "messages": Format(read=_read_messages, write=_write_messages, events=_messages_events),
    "responses": Format(read=_read_response, write=_write_response, events=_response_events),
    "completions": Format(read=_read_completion, write=_write_completion, events=_completion_events),
}
"""By the end of their address."""


def stream(answer: dict[str, Any], body: Mapping[str, Any], form: Format) -> str:
    """Return an answer as the server-sent events of its API."""
    events = [
        (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"
        for name, data in form.events(answer, body)
    ]
    return "".join(events) + ("" if events and events[0].startswith("event:") else "data: [DONE]\n\n")
