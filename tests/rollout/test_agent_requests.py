"""Requests as real clients send them: what is honoured, ignored or refused, and how long clients wait."""

import asyncio
import json
import re
import threading
from collections.abc import Mapping
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_builders import ADD, CALL, CLAUDE_ADD, HERMES, own, post, say, train, trained, user
from chat_builders import CHATML, LONG, make_tokenizer
from episode_builders import Failing, Speaker, load

from areal_lite.errors import EpisodeError
from areal_lite.rollout.api_fields import Refusal

TWO_CALLS = "so " + CALL + CALL.replace("2", "7")
FLAT_ADD = {"type": "function", **ADD["function"]}
TOOLS = {"chat/completions": [ADD], "responses": [FLAT_ADD], "messages": [CLAUDE_ADD]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
KINDS = {
    "chat/completions": {"messages": [user("a")]},
    "completions": {"prompt": "a"},
    "responses": {"input": "a"},
    "messages": {"messages": [user("a")], "max_tokens": 9},
}


def refusal(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response that tells clients not to retry."""
    assert response.headers["x-should-retry"] == "false", response.text
    error: dict[str, Any] = response.json()["error"]
    assert response.json()["type"] == "error"
    return {"status": response.status_code, **error}


def asking(scenario: Any, answers: Any = lambda _: "abc", **options: Any) -> tuple[Any, Speaker]:
    """Run an agent that ends with a call of its own, so that there is a sample."""

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        await scenario(llm)
        await say(llm, [user("z")])

    return trained(agent, answers, **options)


def test_a_thread_is_refused_so_that_the_client_sends_all_messages() -> None:
    """By Anthropic's own loop over tools. Seen failing: the second call had the tool's result alone in its context."""

    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        async with anthropic.AsyncAnthropic(base_url=llm.anthropic_base_url, api_key=llm.api_key) as client:
            runner = client.beta.messages.tool_runner(
                model="m", max_tokens=100, messages=[{"role": "user", "content": "1+2?"}], tools=[add]
            )
            assert (await runner.until_done()).content[0].text == "it is 3"
        thread = {"type": "continue", "previous_message_id": "msg_1"}
        error = refusal(await post(llm, "messages", {**KINDS["messages"], "thread": thread}))
        assert (error["status"], error["details"]["error_code"]) == (400, "thread_unsupported_request")

    sample, speaker = trained(agent, ["so " + CALL, "it is 3"], **HERMES)
    assert sample.branches == ()
    first, second = (speaker.tokenizer.decode(context) for context in speaker.contexts)
    assert second.startswith(first + "so " + CALL + "<|im_end|>")


def test_a_streamed_text_and_a_tool_call_come_one_after_the_other() -> None:
    """Seen failing with both in one delta, of which autogen reads the text alone."""

    async def scenario(llm: Any) -> None:
        stream = await llm.client.chat.completions.create(model="m", messages=[user("1+2?")], tools=[ADD], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert [(delta.content, bool(delta.tool_calls)) for delta in deltas] == [
            ("", False), ("so ", False), (None, True), (None, False)
        ]  # fmt: skip

    asking(scenario, ["so " + CALL, "z"], **HERMES)


@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
def test_a_client_that_wants_one_tool_call_at_a_time_gets_one(api: str) -> None:
    """And the tokens of the other stay in the context. Seen failing: both came back, or the wish was refused."""

    async def scenario(llm: Any) -> None:
        wish: dict[str, Any] = {"parallel_tool_calls": False}
        if api == "messages":
            wish = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "max_tokens": 200}
        answer = (await post(llm, api, KINDS[api] | {"tools": TOOLS[api]} | wish)).json()
        if api == "chat/completions":
            assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
        else:
            _, call = answer["content" if api == "messages" else "output"]  # behind a text
            assert call["type"] in ("tool_use", "function_call")

    sample, speaker = asking(scenario, [TWO_CALLS, "z"], sampling=LONG, **HERMES)
    assert TWO_CALLS in speaker.tokenizer.decode(own(sample))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("api", "end"), [("chat/completions", "length"), ("messages", "max_tokens")])
def test_a_tool_call_that_was_cut_off_is_not_reported_as_complete(api: str, end: str, is_streamed: bool) -> None:
    """Seen failing with `tool_calls` and `tool_use`: the client ran what the parser had completed."""

    async def scenario(llm: Any) -> None:
        asked = {"tools": TOOLS[api], "max_tokens": len(CALL), "stream": is_streamed}
        answer = (await post(llm, api, KINDS[api] | asked)).text.replace(" ", "")
        assert '"name":"add"' in answer
        assert re.findall(r'_reason":"(\w+)"', answer) == [end]

    asking(scenario, [CALL + " more", "z"], **HERMES)


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("messages", {"tool_choice": {"type": "any"}, "temperature": 0.5, "mcp_servers": [{"name": "x"}]}),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
        ("responses", {"tool_choice": "required", "n": 2, "truncation": "auto", "tools": [{"type": "web_search"}]}),
        ("chat/completions", {"temperature": 0.3, "top_p": 0.9, "logit_bias": {"5": 1}, "guided_json": SCHEMA}),
        ("chat/completions", {"structured_outputs": {"regex": "a"}, "min_tokens": 3, "ignore_eos": True}),
        ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}, "chat_template": "x"}),
        ("chat/completions", {"stop_token_ids": [3], "truncate_prompt_tokens": 5, "logits_processors": ["x"]}),
        ("chat/completions", {"include_stop_str_in_output": True, "use_beam_search": True, "length_penalty": 2.0}),
        ("chat/completions", {"documents": [{"text": "x"}]}),
        ("completions", {"echo": True}),
        *((api, {"no_such_field": 1}) for api in KINDS),
    ],
)
def test_what_is_in_no_table_or_refused_there_is_a_400_that_names_it(api: str, fields: dict[str, Any]) -> None:
    """Each was ignored, or the same wish was refused by one API and ignored by another. Seen failing with 200."""
    others = KINDS[api] | ({"tools": TOOLS[api]} if api in TOOLS else {})

    async def scenario(llm: Any) -> None:
        for name, value in fields.items():
            error = refusal(await post(llm, api, others | {name: value}))
            assert error["status"] == 400
            assert name in error["message"]
            assert "Fix: " in error["message"]

    _, speaker = asking(scenario, **HERMES)
    assert len(speaker.contexts) == 1


@pytest.mark.parametrize(
    ("api", "field"),
    [
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}}),
        ("messages", {"tools": [CLAUDE_ADD], "tool_choice": {"type": "none"}}),
        ("chat/completions", {"reasoning_effort": "low", "seed": 3, "logprobs": True, "store": True}),
        ("chat/completions", {"top_logprobs": 3, "top_p": 1, "chat_template_kwargs": {}, "no_such_field": None}),
        ("responses", {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "store": False}),
        ("responses", {"client_metadata": {"session_id": "x"}}),
        ("completions", {"seed": 3, "logprobs": 2, "user": "x"}),
    ],
)
def test_what_cannot_change_the_policy_is_ignored(api: str, field: dict[str, Any]) -> None:
    """Null and neutral values too. Seen failing (thinking): vLLM refused a budget of thoughts above max_tokens."""

    async def scenario(llm: Any) -> None:
        assert (await post(llm, api, KINDS[api] | field)).status_code == 200

    asking(scenario, **HERMES)


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat/completions", {"tools": [], "tool_choice": "auto", "n": "x", "max_tokens": 0, "stop": ""}),
        ("chat/completions", {"stop": ["a", ""], "messages": [{"role": "user", "content": ["a"]}]}),
        ("chat/completions", {"stream_options": {"include_usage": True}, "response_format": {"type": "json_schema"}}),
        ("responses", {"input": [{"type": "item_reference", "id": "msg_1"}], "prompt": {"id": "x"}, "text": "x"}),
        ("responses", {"input": [{"type": "message", "role": "assistant", "content": []}]}),
    ],
)
def test_what_vllm_refuses_is_a_400_and_not_sent_again(api: str, fields: dict[str, Any]) -> None:
    """Over `llm.client` it is the SDK's error. Seen failing: a bare 500, and vLLM's own exception from the client."""

    async def scenario(llm: Any) -> None:
        resource = llm.client.responses if api == "responses" else llm.client.chat.completions
        for name, value in fields.items():
            assert refusal(await post(llm, api, KINDS[api] | {name: value}))["status"] == 400
            with pytest.raises(openai.BadRequestError):
                await resource.create(**{"model": "m", **KINDS[api], name: value})

    asking(scenario, **HERMES)


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    """The model would never know of them; nor would its calls be read without a parser. Seen failing: 200."""

    def refused_with(words: str) -> Any:
        async def scenario(llm: Any) -> None:
            error = refusal(await post(llm, "chat/completions", {**KINDS["chat/completions"], "tools": [ADD]}))
            assert words in error["message"]

        return scenario

    asking(refused_with("a template that does not show tools"), rollout=HERMES["rollout"], template=CHATML)
    asking(refused_with("tools need rollout.tool_parser"))


ONE_SYSTEM = (
    "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + CHATML
)


@pytest.mark.parametrize(
    ("api", "first"),
    [
        ("chat/completions", {"messages": [{"role": "system", "content": "s"}]}),
        ("responses", {"instructions": "s", "input": []}),
        ("messages", {"system": "s", "messages": [], "max_tokens": 9}),
    ],
)
def test_later_system_messages_are_the_users_where_the_template_refuses_them(api: str, first: dict[str, Any]) -> None:
    """As Claude Code and Codex send them, to Qwen3.5's template. Seen failing: a 400 for each call."""
    field, note = "input" if api == "responses" else "messages", {"role": "system", "content": "note"}

    async def scenario(llm: Any) -> None:
        turns = [user("a"), note, {"role": "assistant", "content": "abc"}, user("b"), note]
        for num in (2, 5):
            response = await post(llm, api, {**first, field: first[field] + turns[:num]})
            assert response.status_code == 200, response.text

    sample, speaker = asking(scenario, template=ONE_SYSTEM)
    assert len(sample.branches) == 1  # the two calls
    for name, context in zip("ab", speaker.contexts[:2], strict=True):
        ending = f"<|im_start|>user\n{name}<|im_end|>\n<|im_start|>user\nnote<|im_end|>\n<|im_start|>assistant\n"
        assert speaker.tokenizer.decode(context).endswith(ending)


def test_a_tool_call_that_its_parser_cannot_read_stays_text() -> None:
    """Without the thoughts. Seen failing with status 500."""

    async def scenario(llm: Any) -> None:
        assert await say(llm, [user("a")], tools=[ADD]) == malformed

    malformed = "<|action_start|><|plugin|>{<|action_end|>"
    parsers = {"tool_parser": "internlm", "reasoning_parser": "qwen3"}
    asking(scenario, ["hm</think>" + malformed, "z"], **HERMES | {"rollout": parsers})


def test_a_template_gets_the_thoughts_of_a_history_by_both_names() -> None:
    """From each API. Seen failing without them: vLLM replaces the name that most templates read."""
    said, hm = {"role": "assistant", "content": "yes"}, {"type": "thinking", "thinking": "hm", "signature": "x"}
    yes, item = {"type": "text", "text": "yes"}, {"type": "reasoning", "id": "r", "summary": []}

    async def scenario(llm: Any) -> None:
        for name in ("reasoning", "reasoning_content"):
            await say(llm, [user("a"), {**said, name: "hm"}, user("b")])
        items = [{**item, "content": [{"type": "reasoning_text", "text": "hm"}]}, said]
        await llm.client.responses.create(model="m", input=[user("a"), *items, user("b")])
        asked = {"messages": [user("a"), {**said, "content": [hm, yes]}, user("b")]}
        assert (await post(llm, "messages", KINDS["messages"] | asked)).status_code == 200

    names = "(message.reasoning or '') + (message.reasoning_content or '') + message.content"
    _, speaker = asking(scenario, template=CHATML.replace("message.content", names))
    for context in speaker.contexts[:4]:
        assert "assistant\nhmhmyes<" in speaker.tokenizer.decode(context)


FORCED = {
    "chat/completions": {"tools": [ADD], "tool_choice": "required", "temperature": 0.1, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "completions": {"temperature": 0.1, "top_p": 0.5},
    "responses": {"tools": [FLAT_ADD], "tool_choice": {"type": "function", "name": "add"}, "text": {
        "format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "messages": {"tools": [CLAUDE_ADD], "tool_choice": {"type": "tool", "name": "add"}, "output_config": {
        "effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
}  # fmt: skip
COUNTED = {
    "chat/completions": {"temperature": 1, "tool_choice": 1, "response_format": 1},
    "completions": {"temperature": 1, "top_p": 1},
    "responses": {"tool_choice": 1, "text.format": 1},
    "messages": {"tool_choice.type": 1, "tool_choice.name": 1, "output_config.format": 1},
}


@pytest.mark.parametrize("api", list(KINDS))
def test_a_recipe_may_have_constraints_left_out_and_counted(api: str) -> None:
    """The answer is the policy's own, tools are shown all the same; another field is still refused.

    Seen failing: no such setting.
    """

    async def scenario(llm: Any) -> None:
        assert (await post(llm, api, KINDS[api] | FORCED[api])).status_code == 200
        assert dict(llm.endpoint.unconstrained) == COUNTED[api]
        assert refusal(await post(llm, api, KINDS[api] | {"no_such_field": 1}))["status"] == 400

    options = {**HERMES, "rollout": {"tool_parser": "hermes", "serve_unconstrained": True}}
    sample, speaker = asking(scenario, **options)
    assert {sampling.temperature for sampling in speaker.samplings} == {1.0}
    assert ("Add." in speaker.tokenizer.decode(speaker.contexts[0])) == ("tools" in FORCED[api])
    assert len(sample.branches) == 1


def test_a_key_for_another_request_is_an_error() -> None:
    """Seen failing: it got the answer of the first."""

    async def scenario(llm: Any) -> None:
        await post(llm, "completions", {"prompt": "a"}, **{"idempotency-key": "k"})
        error = refusal(await post(llm, "completions", {"prompt": "b"}, **{"idempotency-key": "k"}))
        assert (error["status"], error["code"]) == (422, "idempotency_key_reused")

    _, speaker = asking(scenario, ["1", "2"])
    assert len(speaker.contexts) == 2


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"messages": [{"role": "user", "content": "' + b"a" * 2**24 + b'"}]}', 413, "a request must have at most"),
        (b'{"messages": ' + json.dumps([user("a")] * 5000).encode() + b"}", 400, "got 5000 messages"),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": 20000}', 400, ""),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": 129}', 400, "n must be between 1 and 128"),
        (b'{"messages": ' + b"[" * 100_000, 400, "recursion"),
        (b"[1]", 400, "must be a JSON object, got list"),
        (b"null", 400, "must be a JSON object, got NoneType"),
    ],
)
def test_what_is_too_large_or_no_request_is_refused_unrendered(body: bytes, status: int, message: str) -> None:
    """Over the socket and without it. Seen failing: all were rendered, or generated."""

    async def scenario(llm: Any) -> None:
        error = refusal(await post(llm, "chat/completions", body))
        assert error["status"] == status
        assert message in error["message"]
        name = llm.anthropic_base_url.rpartition("/")[2]
        with pytest.raises(Refusal, match=message or None):
            await llm.endpoint.answer(name, llm.api_key, "chat/completions", body)

    tokenizer = Noted(make_tokenizer(CHATML))
    asking(scenario, engine=Speaker(lambda _: "abc", tokenizer=tokenizer))
    assert tokenizer.num_rendered == 1


class Noted:
    """A tokenizer that notes which threads rendered and tokenised with it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.threads, self.num_rendered = tokenizer, set[str](), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return self.tokenizer(*arguments, **options)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.num_rendered += 1
        return self.tokenizer.apply_chat_template(*arguments, **options)


def test_nothing_is_rendered_or_tokenised_on_the_event_loop() -> None:
    """Of chats and of texts, first ones and those that continue. Seen failing with all of it in the main thread."""

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        messages = [user("a")]
        await say(llm, messages)
        await say(llm, [*messages, user("b")])
        first = await llm.client.completions.create(model="m", prompt="Q")
        await llm.client.completions.create(model="m", prompt=f"Q{first.choices[0].text} more")

    class Silent(Speaker):
        """Generates without its tokenizer."""

        async def generate(self, prompt_ids: Any, sampling: Any) -> Any:
            mine, self.tokenizer = self.tokenizer, plain
            try:
                return await super().generate(prompt_ids, sampling)
            finally:
                self.tokenizer = mine

    plain = make_tokenizer(CHATML)
    tokenizer = Noted(plain)
    sample, _ = trained(agent, [], engine=Silent(["x", "y", "z", "w"], tokenizer=tokenizer))
    assert len(sample.branches) == 1
    assert tokenizer.num_rendered >= 2
    assert {name.rpartition("_")[0] for name in tokenizer.threads} == {"render"}


@pytest.mark.parametrize("sent", [b"", b"POST /sessions/x/v1/completions HTTP/1.1\r\nhost", b"head and half"])
def test_an_idle_connection_is_closed_without_a_traceback(sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """No request, half a head, or half a body. Seen failing: each stayed open; and half a body logged 45 lines."""

    async def scenario(llm: Any) -> None:
        address = httpx.URL(llm.base_url)
        lines = [f"POST {address.path}/completions HTTP/1.1", "host: x", f"x-api-key: {llm.api_key}"]
        head = "\r\n".join([*lines, "content-length: 9", "", "{"])
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(head.encode() if sent.startswith(b"head") else sent)
        assert await reader.read() == b""  # the end of the connection
        writer.close()

    asking(scenario, endpoint={"idle_timeout_s": 0.2})
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("api", list(KINDS))
def test_a_stream_opens_at_once_and_shows_signs_of_life(api: str) -> None:
    """And ends as ever. Seen failing: nothing came before the answer was finished."""

    async def scenario(llm: Any) -> None:
        await engine.pause("recompute")
        url, body = f"{llm.base_url}/{api}", {"model": "m", **KINDS[api], "stream": True}
        lines, num_signs = list[str](), 0
        async with (
            httpx.AsyncClient(timeout=120.0, trust_env=False) as client,
            client.stream("POST", url, json=body, headers={"x-api-key": llm.api_key}) as response,
        ):
            async for line in response.aiter_lines():
                lines.append(line)
                num_signs += line == ("event: ping" if api == "messages" else ": generating")
                if num_signs == 3:
                    num_signs += 1
                    opening = lines.copy()
                    await engine.resume()
        assert any(OPENINGS[api] in line for line in opening)
        assert not any("xyz" in line for line in opening)
        assert any("xyz" in line for line in lines)
        assert lines[-3:].count("data: [DONE]") == (api in ("chat/completions", "completions"))

    engine = Speaker(lambda _: "xyz", tokenizer=make_tokenizer(CHATML))
    asking(scenario, engine=engine, endpoint={"keep_alive_s": 0.02})


OPENINGS = {
    "chat/completions": '"role": "assistant"',
    "completions": ": generating",
    "responses": '"type": "response.created"',
    "messages": '"type": "message_start"',
}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_what_fails_while_it_is_streamed_is_the_clients_error(api: str) -> None:
    """In the way of each SDK; what is refused before is a status, as without a stream. Seen failing with a status."""

    async def scenario(llm: Any) -> None:
        async with anthropic.AsyncAnthropic(base_url=llm.anthropic_base_url, api_key=llm.api_key) as client:
            asks = {
                "chat": lambda: llm.client.chat.completions.create(model="m", messages=[user("a")], stream=True),
                "responses": lambda: llm.client.responses.create(model="m", input="a", stream=True),
                "messages": lambda: client.messages.create(model="m", max_tokens=9, messages=[user("a")], stream=True),
            }
            stream = await asks[api]()
            with pytest.raises((openai.APIError, anthropic.APIError), match="RuntimeError: no luck"):
                [event async for event in stream]
        with pytest.raises(openai.BadRequestError, match="prompt is too long"):
            await llm.client.chat.completions.create(model="m", messages=[user("a" * 5000)], stream=True)

    engine = Failing(lambda _: "abc", RuntimeError("no luck"), tokenizer=make_tokenizer(CHATML))
    sample, _ = asking(scenario, engine=engine)
    assert sample.branches == ()


def test_the_text_of_an_error_is_bounded_where_it_is_kept_and_sent(caplog: pytest.LogCaptureFixture) -> None:
    """And an agent that raises is a lost sample. Seen failing with 100,000 characters in each place, and with an error
    that pays 0.
    """

    async def agent(task: Mapping[str, Any], llm: Any) -> float:
        error = refusal(await post(llm, "completions", {"prompt": "a", "x" * 100_000: 1}))
        assert len(error["message"]) <= 1000
        await say(llm, [user("a")])
        raise ValueError("y" * 100_000)

    ((error,), _), workflows = train(agent, ["a"]), load()
    assert isinstance(error, EpisodeError)
    workflows.log(error, "sample 0")
    assert len(str(error)) < 1000
    assert error.reason == "workflow:ValueError"
    assert 0 < len(caplog.text) < 20_000
