"""JSONL files, the tokenizer of single characters, tokenised sources and the prompt cursor."""

import json
import logging
from dataclasses import replace

import pytest
from places import FIXTURES
from source_builders import make_prompts, write_jsonl
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from train_builders import save_tiny_model
from transformers import AutoTokenizer

from areal_lite.config.data import CHAT, SourceConfig
from areal_lite.config.recipe import parse_config
from areal_lite.config.sections import ModelConfig
from areal_lite.data.arith import CHARACTERS
from areal_lite.data.cursor import PromptCursor
from areal_lite.data.encode import decoder, load_tokenizer, render_chat
from areal_lite.data.prompts import load_source
from areal_lite.data.sources import load_tasks
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import CheckpointError, ConfigError, DataError

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-=?.,:<>|\n"


def load(path, *, max_bad_fraction=1.0, **settings):
    source = SourceConfig(source="jsonl", path=str(path), max_bad_fraction=max_bad_fraction, **settings)
    return load_tasks(source, "train", where="data")


def jsonl_config(path=None, **sections):
    data = {"source": "jsonl", "path": str(path or FIXTURES / "gsm8k_like.jsonl"), **sections.pop("data", {})}
    return parse_config({"data": data, **sections})


# --- JSONL ---


def test_broken_lines_are_named_by_file_and_line_and_counted(caplog):
    """Seen failing with `enumerate(file)` counting from 0, and with blank lines counted as broken."""
    with caplog.at_level(logging.WARNING):
        load(FIXTURES / "broken.jsonl")
    named = [record.getMessage() for record in caplog.records]
    assert named[-1].startswith("6 of 9 rows of ")
    for line, message in zip([4, 6, 7, 8, 9, 10], named[:-1], strict=True):
        assert f"broken.jsonl:{line} is left out" in message


def test_too_many_broken_lines_is_an_error():
    with pytest.raises(DataError, match=r"6 of 9 rows.*max_bad_fraction=0\.5.*line 4") as caught:
        load(FIXTURES / "broken.jsonl", max_bad_fraction=0.5)
    assert "Repair them, or raise data.max_bad_fraction" in str(caught.value)
    assert len(load(FIXTURES / "broken.jsonl", max_bad_fraction=6 / 9)) == 3


def test_a_missing_column_names_the_nearest(tmp_path):
    """And columns inside columns among those that there are. Seen failing with the outer ones alone."""
    with pytest.raises(DataError, match=r"no column 'questoin'.*set data\.prompt_column; did you mean question\?"):
        load(FIXTURES / "gsm8k_like.jsonl", prompt_column="questoin")
    with pytest.raises(DataError, match=r"no column 'anser'.*set data\.answer_column; did you mean "):
        load(FIXTURES / "gsm8k_like.jsonl", answer_column="anser")
    (tmp_path / "x.jsonl").write_text('{"problem": "1+1", "info": {"id": 3, "solution": 2}}\n' * 2)
    with pytest.raises(DataError, match=r"'info\.soluton'.*; did you mean info\.solution\?"):
        load(tmp_path / "x.jsonl", prompt_column="problem", answer_column="info.soluton")
    with pytest.raises(
        DataError, match=r"'question' in any row, only info, info\.id, info\.solution, problem: set [^;]*$"
    ):
        load(tmp_path / "x.jsonl", prompt_column="question", answer_column="info.solution")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(DataError, match="holds no rows"):
        load(tmp_path / "x.jsonl")


def test_line_ends_inside_texts_and_a_byte_order_mark_are_no_line_ends(tmp_path):
    """Seen failing with `read_text().splitlines()`, which also splits at U+2028."""
    row = {"question": "a\u2028b", "answer": "1"}
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\r\n")
    assert load(tmp_path / "x.jsonl")[0].prompt == "a\u2028b"


def test_bytes_that_are_no_text_and_endless_nesting_are_broken_lines(tmp_path):
    good = b'{"question": "q", "answer": "a"}\n'
    (tmp_path / "x.jsonl").write_bytes(good + b'{"question": "\xff"}\n' + b"[" * 100_000 + b"\n")
    assert len(load(tmp_path / "x.jsonl")) == 1


# --- tokenizer ---


def test_the_tokenizer_survives_saving(tmp_path):
    """Seen failing without `decoders.Fuse()`: decoded characters came back with spaces between them."""
    build_char_tokenizer(CHARACTERS).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "7+25-13=?7+25=32;32-13=19#19"
    ids = tokenizer(text)["input_ids"]
    assert ids == [2 + CHARACTERS.index(character) for character in text]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2 + len(CHARACTERS))
    assert tokenizer.decode([*ids, 1, 0], skip_special_tokens=True) == text


def test_the_text_of_a_completion_keeps_special_tokens_but_those_of_a_sequences_ends(tmp_path):
    """`</think>` is special here, as with some models. Seen failing with special tokens left out: 1312."""
    tokenizer = build_char_tokenizer(CHARACTERS)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("</think>", "<turn>", "<s>")])
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    thought, turn, bos = tokenizer.convert_tokens_to_ids(["</think>", "<turn>", "<s>"])
    ids = [bos, *tokenizer("13")["input_ids"], thought, *tokenizer("12")["input_ids"], turn, 1, 0]
    assert decoder(tokenizer, tmp_path, skip_special_tokens=False)(ids) == "13</think>12<turn>"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, turn]}))
    assert decoder(tokenizer, tmp_path, skip_special_tokens=False)(ids) == "13</think>12"
    assert decoder(tokenizer, tmp_path, skip_special_tokens=True)(ids) == "1312"


def test_decoding_cleans_up_no_spaces(tmp_path):
    build_char_tokenizer(" .,'n?!st").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = " n 't  . , ? !  's "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


# --- source ---


def test_jsonl_source_applies_the_template_and_keeps_the_raw_answer():
    config = jsonl_config(data={"template": "Q: {prompt}\nA:"})
    prompts = load_source(config, build_char_tokenizer(LETTERS), "train")
    assert prompts[0].text == (
        "Q: A baker fills 3 trays with 12 rolls each and sells 7 rolls. How many rolls are left?\nA:"
    )
    assert prompts[0].answer.endswith("#### 29")
    assert len(prompts[0].token_ids) == len(prompts[0].text)


def test_chat_template_is_applied_and_adds_special_tokens_once():
    """Seen failing with `add_special_tokens=True` on rendered chat prompts: the sequence began twice."""
    tokenizer = build_char_tokenizer(LETTERS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.chat_template = "<u>{{ messages[0]['content'] }}{% if add_generation_prompt %}<a>{% endif %}"
    prompts = load_source(jsonl_config(data={"chat": True}), tokenizer, "train")
    assert prompts[1].text == "<u>A hall has 40 rows of 35 seats. How many seats is that?<a>"
    assert tokenizer.decode(prompts[1].token_ids) == prompts[1].text
    assert load_source(jsonl_config(), tokenizer, "train")[1].token_ids[0] == tokenizer.eos_token_id


def test_a_turn_end_at_which_nothing_stops_is_reported(caplog):
    """As of base models. Seen failing without a warning: the model would write the user's next turn as well."""
    tokenizer = build_char_tokenizer(LETTERS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    for end, count in (("<eos>", 0), ("<end>", 1)):
        tokenizer.chat_template = "{% for m in messages %}<end>{{ m.role }} {{ m.content }}" + end + "{% endfor %}"
        load_source(jsonl_config(data={"chat": True}), tokenizer, "train")
        assert caplog.text.count("ends answers with '<end>'") == count


def test_a_plain_prompt_begins_once():
    """Its template writes the first token, which the tokenizer adds as well. Seen failing with both: [1, 1, ...].

    An end that the tokenizer adds is left out. Seen failing with [1, ..., 1].
    """
    tokenizer = build_char_tokenizer(LETTERS)
    tokenizer.add_special_tokens({"bos_token": "<eos>"})
    frame = TemplateProcessing(single="<eos> $A <eos>", special_tokens=[("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = frame
    with_mark = load_source(jsonl_config(data={"template": "<eos>{prompt}"}), tokenizer, "train")[1]
    assert with_mark.token_ids == load_source(jsonl_config(), tokenizer, "train")[1].token_ids
    assert with_mark.token_ids.count(1) == 1


def test_chat_without_a_template_is_an_error():
    with pytest.raises(ConfigError, match=r"set data\.chat=false"):
        load_source(jsonl_config(data={"chat": True}), build_char_tokenizer(LETTERS), "train")


def test_a_chat_that_ends_with_an_answer_is_no_prompt(tmp_path):
    """Its template would end that answer and begin another. Seen failing by rendering both."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": messages, "answer": "1"}])
    with pytest.raises(DataError, match=r"got one of the assistant's at .*rows\.jsonl:1\. Fix: "):
        load_source(jsonl_config(data={"path": str(path)}), None, "train")


def test_a_template_is_for_texts_alone(tmp_path):
    """Seen failing: chats went to the model without it."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": [{"role": "user", "content": "a"}], "answer": "1"}])
    with pytest.raises(ConfigError, match=r"data\.template is .*, got chat messages at .*rows\.jsonl:1\. Fix: "):
        load_source(jsonl_config(data={"path": str(path), "template": "{prompt}!"}), None, "train")


def test_the_messages_of_a_chat_hold_text_and_no_empty_keys(tmp_path):
    """As tables and OpenAI's clients write them, and for templates that write calls beside a null content alone.

    Seen failing with all of them in the chat as they are, and with calls that DeepSeek's template left out.
    """
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}]
    contents = (None, 3, [{"type": "image_url"}], [{"type": "text", "text": None}])
    chats = [[{"role": "user", "content": parts, "tool_calls": None}, call, {"role": "tool", "content": "c"}]]
    chats += [[{"role": "user", "content": content}] for content in contents]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": messages, "answer": "1"} for messages in chats])
    (task,) = load(path)
    assert task.messages[0] == {"role": "user", "content": "a\nb"}
    assert [message["content"] for message in task.messages[1:]] == ["", "c"]
    for condition, called in (("true", "f"), ("m.content is none", "f"), ("m.content.f", "")):
        tokenizer = build_char_tokenizer(LETTERS)
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m.tool_calls and IT %}{{ m.tool_calls[0].function.name }}{% else %}"
            "{{ m.content }}{% endif %}{% endfor %}"
        ).replace("IT", condition)
        assert render_chat(task.messages, tokenizer) == f"a\nb{called}c"


def test_a_prompt_longer_than_the_context_names_line_length_limit_and_remedy():
    """The limit itself is allowed: 84 characters fit, at 83 the first row is one too long. Seen failing with `>=`."""
    tokenizer = build_char_tokenizer(LETTERS)
    rollout = {"max_new_tokens": 16}
    assert load_source(jsonl_config(model={"max_context": 100}, rollout=rollout), tokenizer, "train")
    with pytest.raises(ConfigError, match=r"99 - 16 = 83 tokens, got 84 at .*gsm8k_like\.jsonl:1 \(1 such") as caught:
        load_source(jsonl_config(model={"max_context": 99}, rollout=rollout), tokenizer, "train")
    assert "raise model.max_context" in str(caught.value)


@pytest.mark.parametrize("limit", ["20", 0, 2.5])
def test_a_row_limit_that_is_no_number_of_tokens_names_its_line(limit, tmp_path):
    """Seen failing without the type check: the run would fail every group of that row."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "abc", "answer": "1", "max_new_tokens": limit}])
    with pytest.raises(DataError, match=r"at least 1, got .* at .*rows\.jsonl:1"):
        load_source(jsonl_config(data={"path": str(path)}), build_char_tokenizer(LETTERS), "train")


def test_a_row_limit_counts_for_the_length(tmp_path):
    """3 characters and 20 tokens do not fit into 22. Seen failing with `rollout.max_new_tokens` taken for every row."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "abc", "answer": "1", "max_new_tokens": 20}])
    config = jsonl_config(data={"path": str(path)}, model={"max_context": 22}, rollout={"max_new_tokens": 4})
    with pytest.raises(ConfigError, match="22 - 20 = 2 tokens, got 3"):
        load_source(config, build_char_tokenizer(LETTERS), "train")


def test_text_outside_the_vocabulary_is_an_error_that_names_character_and_row(tmp_path):
    """Row 2 is the first with a character that is missing, and the letter e the first of them."""
    rows = [{"question": text, "answer": "1"} for text in ("1+1=?", "1+e=x", "y")]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .* cannot encode the character 'e' \(U\+0065\) "):
        load_source(jsonl_config(write_jsonl(tmp_path / "rows.jsonl", rows)), build_char_tokenizer(CHARACTERS), "train")


# --- cursor ---


def test_every_epoch_gives_every_prompt_once_in_another_order():
    """Seen failing with the epoch left out of the shuffle's seed."""
    cursor = PromptCursor(make_prompts(50), source="train", seed=7)
    epochs = [[cursor.next() for _ in range(50)] for _ in range(3)]
    for epoch, prompts in enumerate(epochs):
        assert sorted(int(prompt.answer) for prompt in prompts) == list(range(50))
        assert all(prompt.prompt_id == f"train/{epoch}/{prompt.answer}" for prompt in prompts)
    orders = [[prompt.answer for prompt in prompts] for prompts in epochs]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_get_finds_every_prompt_given_out():
    cursor = PromptCursor(make_prompts(5), source="train", seed=0)
    for prompt in [cursor.next() for _ in range(12)]:
        assert cursor.get(prompt.prompt_id) == prompt


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (PromptCursor(make_prompts(5), source="train", seed=1), "seed was 1 and is 0"),
        (PromptCursor(make_prompts(4), source="train", seed=0), "num_prompts was 4 and is 5"),
        (PromptCursor(make_prompts(5), source="other", seed=0), "source was 'other' and is 'train'"),
        (PromptCursor(make_prompts(5)[::-1], source="train", seed=0), "checksum was"),
    ],
)
def test_a_state_of_other_data_is_refused_with_the_difference(other, difference):
    with pytest.raises(CheckpointError, match=difference):
        PromptCursor(make_prompts(5), source="train", seed=0).load(other.state())


def test_a_chat_is_the_same_data_on_another_day():
    """Its template may write the date. Seen failing with "checksum was"."""
    days = [[replace(make_prompts(1)[0], text=date, row={CHAT: [{}]})] for date in ("27 Nov", "28 Nov")]
    first, second = (PromptCursor(prompts, source="train", seed=0) for prompts in days)
    second.load(first.state())


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    """transformers makes up an empty one where it knows the model. Seen failing without the look at its words."""
    save_tiny_model(tmp_path, max_context=32)
    assert len(load_tokenizer(tmp_path, ModelConfig())) > 10
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match=f"must hold its tokenizer .*in {tmp_path}: copy"):
        load_tokenizer(tmp_path, ModelConfig())


def test_the_chat_template_gets_the_arguments_of_the_recipe(tmp_path):
    """Seen failing with `chat_arguments` passed over."""
    tokenizer = build_char_tokenizer(LETTERS)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if not thinking %}|no thoughts{% endif %}"
    save_tiny_model(tmp_path, tokenizer=tokenizer)
    for thinking in (True, False):
        config = jsonl_config(data={"chat": True}, model={"chat_arguments": {"thinking": thinking}})
        prompt, *_ = load_source(config, load_tokenizer(tmp_path, config.model), "train")
        assert prompt.text.endswith("|no thoughts") != thinking
