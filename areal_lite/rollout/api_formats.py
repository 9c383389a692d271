"""The APIs that agents speak: from the body of a request to what is asked of a session, and from calls to an answer.

Nothing here sends or generates. Requests are checked and converted by vLLM's own classes; streams are made of finished
answers, so that no token is lost in them.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
            "message": {**call.answer, "content": call.answer["content"] or None},
            "finish_reason": "tool_calls" if call.answer.get("tool_calls") else _finish(call),
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
    return "length" if call.turn.stop_reason is StopReason.LENGTH else "stop"


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


FORMATS = {
    "chat/completions": Format(read=_read_chat, write=_write_chat, events=_chat_events),
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
