"""The fields of a request, by API: those that the endpoint honours, ignores or refuses.

`docs/agents.md` shows this table. Any field outside it is refused. A dotted name is a field inside an object.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, tuple[Any, ...]]
"""The values of each field that change nothing; null never does."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _values(text: str) -> Values:
    """Read names, each perhaps with its values as JSON without spaces: `top_p=1 top_k=0,-1 temperature`."""
    fields = (one.partition("=") for one in text.split())
    return {name: tuple(json.loads(f"[{values}]")) for name, _, values in fields}


# The recipe's own temperature is accepted too.
_POLICY = """temperature top_p=1 top_k=0,-1 min_p=0 presence_penalty=0 frequency_penalty=0 repetition_penalty=1
    logit_bias={} structured_outputs guided_json"""
_CHOICE = 'tool_choice="auto","none"'
_ELSE = """min_tokens=0 bad_words=[] allowed_token_ids stop_token_ids=[] ignore_eos=false length_penalty=1
    include_stop_str_in_output=false skip_special_tokens=true truncate_prompt_tokens use_beam_search=false
    logits_processors=[] return_token_ids=false"""
_TEMPLATE = "chat_template chat_template_kwargs={} documents=[]"
_STORED = "previous_response_id conversation background=false prompt"
_BESIDE = "cache_salt metadata priority prompt_cache_key request_id safety_identifier service_tier session_id user"
_CACHE = "prompt_cache_options prompt_cache_retention store"

_FIXES = {
    **dict.fromkeys(_values(_TEMPLATE), "leave it out, and set model.chat_arguments in the recipe"),
    **dict.fromkeys(
        _values(f"{_STORED} thread"), "leave it out, and send the whole input again, as calls are not stored"
    ),
    "temperature": "leave it out, or set rollout.temperature, or ignore it with rollout.serve_unconstrained=true",
}


class Refusal(Exception):
    """An error that is sent instead of an answer; sending the same request again would not help."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(f"{message:.1000}")  # it may quote the request
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What a request to one API may contain."""

    honoured: tuple[str, ...]
    ignored: tuple[str, ...]
    """They change neither the policy nor its input."""
    constraints: Values
    """Any other value samples from a different policy: it is refused, or left out and counted if the recipe asks."""
    refused: Values

    def checked(
        self, body: Mapping[str, Any], *, temperature: float, serve_unconstrained: bool
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of a request that count, and the names of the constraints that were left out.

        Args:
            temperature: Of the policy; at 0 (greedy) a request may name any.
            serve_unconstrained: Leave constraints out instead of refusing them.

        Raises:
            Refusal: A field, or its value, is not supported.
        """
        allowed = {**self.refused, **self.constraints, "temperature": (temperature or body.get("temperature"),)}
        kept, left_out = dict[str, Any](), list[str]()
        for name, value in self._flat(body):
            outer, _, inner = name.partition(".")
            if name in self.honoured or value is None or value in allowed.get(name, ()):
                (kept.setdefault(outer, {}) if inner else kept)[inner or outer] = value
            elif name in self.constraints and serve_unconstrained:
                left_out.append(name)
            elif name not in self.ignored:
                # Anthropic's SDK recognises this code, and then sends the whole conversation instead of its thread.
                code = "thread_unsupported_request" if name == "thread" else "unsupported_parameter"
                raise Refusal(400, self._reason(name, value, temperature), code=code)
        return kept, left_out

    def _flat(self, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield names and values; objects with dotted names in the table are opened."""
        known = (*self.honoured, *self.ignored, *self.constraints, *self.refused)
        for name, value in body.items():
            if isinstance(value, Mapping) and any(one.startswith(f"{name}.") for one in known):
                yield from ((f"{name}.{inner}", one) for inner, one in value.items())
            else:
                yield name, value

    def _reason(self, name: str, value: Any, temperature: float) -> str:
        got = f"got {name}={value!r:.60}"
        if name in self.constraints:
            fix = _FIXES.get(name, "leave it out, or ignore it with rollout.serve_unconstrained=true")
            return (
                f"calls must sample the policy that trains, at rollout.temperature={temperature:g}; {got}. Fix: {fix}"
            )
        return f"this API does not support {name}; {got}. Fix: {_FIXES.get(name, 'leave it out')}"


FIELDS = {
    "chat/completions": Fields(
        honoured=_names(
            "messages model max_tokens max_completion_tokens n stop stream stream_options tools parallel_tool_calls"
        ),
        ignored=_names(f"{_BESIDE} {_CACHE} logprobs prediction reasoning_effort seed top_logprobs verbosity"),
        constraints=_values(f'{_POLICY} {_CHOICE} response_format={{"type":"text"}}'),
        refused=_values(
            f"{_ELSE} {_TEMPLATE} add_generation_prompt=true add_special_tokens=false continue_final_message=false "
            f'echo=false include_reasoning=true functions=[] function_call="auto","none" modalities=["text"]'
        ),
    ),
    "completions": Fields(
        honoured=_names("prompt model max_tokens n stop stream stream_options"),
        ignored=_names(f"{_BESIDE} logprobs seed"),
        constraints=_values(f'{_POLICY} response_format={{"type":"text"}}'),
        refused=_values(f'{_ELSE} add_special_tokens=true best_of=1 echo=false suffix=""'),
    ),
    "responses": Fields(
        honoured=_names("input instructions model max_output_tokens stop stream tools parallel_tool_calls"),
        ignored=_names(
            f"{_BESIDE} {_CACHE} client_metadata include max_tool_calls reasoning seed stream_options text.verbosity "
            "top_logprobs"
        ),
        constraints=_values(f'{_POLICY} {_CHOICE} text.format={{"type":"text"}}'),
        refused=_values(f'{_ELSE} {_STORED} chat_template_kwargs={{}} include_reasoning=true truncation="disabled"'),
    ),
    "messages": Fields(
        honoured=_names(
            "messages system model max_tokens stop_sequences stream tools tool_choice.disable_parallel_tool_use"
        ),
        ignored=_names(
            "cache_control cache_salt context_management diagnostics inference_geo metadata output_config.effort "
            "service_tier speed thinking"
        ),
        constraints=_values(
            'temperature top_p=1 top_k=0,-1 tool_choice.type="auto","none" tool_choice.name output_config.format'
        ),
        refused=_values("chat_template_kwargs={} mcp_servers=[] thread"),
    ),
}
"""By the last part of an API's URL."""
