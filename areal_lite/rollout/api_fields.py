"""The fields of a request by API: which the endpoint honours, which it ignores, and which it refuses.

`docs/agents.md` shows this table. Any other field is refused. A name with a dot is a field inside an object.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, tuple[Any, ...]]
"""By field, the values that ask for nothing else than what happens anyway; null always does."""

_POLICY: Values = {
    "temperature": (),  # and the recipe's
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "structured_outputs": (),
    "guided_json": (),
}
_CHOICE: Values = {"tool_choice": ("auto", "none")}
_ELSE: Values = {
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "return_token_ids": (False,),
}
_TEMPLATE: Values = {"chat_template": (), "chat_template_kwargs": ({},), "documents": ([],)}
_STORED: Values = {"previous_response_id": (), "conversation": (), "background": (False,), "prompt": ()}
_BESIDE = "cache_salt metadata priority prompt_cache_key request_id safety_identifier service_tier session_id user"
_CACHE = "prompt_cache_options prompt_cache_retention store"

_FIXES = {
    **dict.fromkeys(_TEMPLATE, "leave it out, and set model.chat_arguments in the recipe"),
    **dict.fromkeys([*_STORED, "thread"], "leave it out, and send the whole input again: calls are not stored"),
    "temperature": "leave it out, or set rollout.temperature, or ignore it with rollout.serve_unconstrained=true",
}


class UnsupportedFieldError(ValueError):
    """A request holds a field, or a value of one, that an API here does not take."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What a request to one API may hold."""

    honoured: tuple[str, ...]
    ignored: tuple[str, ...]
    """They change neither the policy nor what it sees."""
    constraints: Values
    """Other values would sample from another policy: refused, or ignored and counted if the recipe wants that."""
    refused: Values

    def checked(
        self, body: Mapping[str, Any], *, temperature: float, serves_unconstrained: bool
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of a request that count, and the names of the constraints that are left out.

        Args:
            temperature: Of the policy; 0 = greedy, where a request may name any.
            serves_unconstrained: Leave constraints out that would be refused.

        Raises:
            UnsupportedFieldError: A field, or its value, is refused.
        """
        allowed = {**self.refused, **self.constraints, "temperature": (temperature or body.get("temperature"),)}
        kept, left_out = dict[str, Any](), list[str]()
        for name, value in self._each(body):
            outer, _, inner = name.partition(".")
            if name in self.honoured or value is None or value in allowed.get(name, ()):
                (kept.setdefault(outer, {}) if inner else kept)[inner or outer] = value
            elif name in self.constraints and serves_unconstrained:
                left_out.append(name)
            elif name not in self.ignored:
                raise UnsupportedFieldError(name, self._refusal(name, value, temperature))
        return kept, left_out

    def _each(self, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        known = (*self.honoured, *self.ignored, *self.constraints, *self.refused)
        for name, value in body.items():
            if isinstance(value, Mapping) and any(one.startswith(f"{name}.") for one in known):
                yield from ((f"{name}.{inner}", one) for inner, one in value.items())
            else:
                yield name, value

    def _refusal(self, name: str, value: Any, temperature: float) -> str:
        got = f"got {name}={value!r:.60}"
        if name in self.constraints:
            fix = _FIXES.get(name, "leave it out, or ignore it with rollout.serve_unconstrained=true")
            return f"calls sample the policy that trains, rollout.temperature={temperature:g} alone; {got}. Fix: {fix}"
        return f"this API does not support {name}; {got}. Fix: {_FIXES.get(name, 'leave it out')}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIELDS = {
    "chat/completions": Fields(
        honoured=_names(
            "messages model max_tokens max_completion_tokens n stop stream stream_options tools parallel_tool_calls"
        ),
        ignored=_names(f"{_BESIDE} {_CACHE} logprobs prediction reasoning_effort seed top_logprobs verbosity"),
        constraints={**_POLICY, **_CHOICE, "response_format": ({"type": "text"},)},
        refused={
            **_ELSE,
            **_TEMPLATE,
            "add_generation_prompt": (True,),
            "add_special_tokens": (False,),
            "continue_final_message": (False,),
            "echo": (False,),
            "include_reasoning": (True,),
            "functions": ([],),
            "function_call": ("auto", "none"),
            "modalities": (["text"],),
        },
    ),
    "completions": Fields(
        honoured=_names("prompt model max_tokens n stop stream stream_options"),
        ignored=_names(f"{_BESIDE} logprobs seed"),
        constraints={**_POLICY, "response_format": ({"type": "text"},)},
        refused={**_ELSE, "add_special_tokens": (True,), "best_of": (1,), "echo": (False,), "suffix": ("",)},
    ),
    "responses": Fields(
        honoured=_names("input instructions model max_output_tokens stop stream tools parallel_tool_calls"),
        ignored=_names(
            f"{_BESIDE} {_CACHE} include max_tool_calls reasoning seed stream_options text.verbosity top_logprobs"
        ),
        constraints={**_POLICY, **_CHOICE, "text.format": ({"type": "text"},)},
        refused={
            **_ELSE,
            **_STORED,
            "chat_template_kwargs": ({},),
            "include_reasoning": (True,),
            "truncation": ("disabled",),
        },
    ),
    "messages": Fields(
        honoured=_names(
            "messages system model max_tokens stop_sequences stream tools tool_choice.disable_parallel_tool_use"
        ),
        ignored=_names(
            "cache_control cache_salt context_management diagnostics inference_geo metadata output_config.effort "
            "service_tier speed thinking"
        ),
        constraints={
            "temperature": (),
            "top_p": (1,),
            "top_k": (0, -1),
            "tool_choice.type": ("auto", "none"),
            "tool_choice.name": (),
            "output_config.format": (),
        },
        refused={"chat_template_kwargs": ({},), "mcp_servers": ([],), "thread": ()},
    ),
}
"""By the end of an API's address."""
