"""Rows of the offline objectives: every source and format, what becomes of them, and every mistake by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from source_builders import write_jsonl, write_parquet
from transformers import PreTrainedTokenizerFast

from areal_lite.config.data import ArithConfig
from areal_lite.config.offline import OfflineConfig
from areal_lite.config.reading import parse_section
from areal_lite.data.arith import CHARACTERS, preference_pairs
from areal_lite.data.completions import OfflineData, load_offline
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import ConfigError, DataError

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}.{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
"""`u:` or `a:` before each message, the assistant's end with <eos>, and all of them with a full stop."""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = build_char_tokenizer(LETTERS)
    made.chat_template = TEMPLATE
    return made


def load_data(
    tokenizer: PreTrainedTokenizerFast, command: str = "sft", *, max_context: int = 64, batch_size: int = 1, **data: Any
) -> OfflineData:
    raw = {
        "command": command,
        "model": {"max_context": max_context},
        "data": {"source": "jsonl", "eval_fraction": 0.0, **data},
        "trainer": {"batch_size": batch_size},
    }
    return load_offline(parse_section(raw, OfflineConfig), tokenizer)


def load(
    tokenizer: PreTrainedTokenizerFast, folder: Path, rows: list[Any], command: str = "sft", **options: Any
) -> OfflineData:
    """Load rows from a file; a text is written as it is, as one line."""
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return load_data(tokenizer, command, path=str(path), **options)


def texts(tokenizer: PreTrainedTokenizerFast, data: OfflineData) -> list[tuple[str, ...]]:
    return [
        (tokenizer.decode(example.prompt), *(tokenizer.decode(ids) for ids in example.completions))
        for example in data.train
    ]


def chat(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


# --- formats ---


def test_plain_completions_end_with_one_end_of_sequence(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    completions = {"one ": "two", "x": "", "y": "a<eos>b"}
    rows = [{"prompt": name, "completion": text} for name, text in completions.items()]
    found = texts(tokenizer, load(tokenizer, tmp_path, rows))
    assert found == [("one ", "two<eos>"), ("x", "<eos>"), ("y", "a<eos>")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("hi", "yo")},
        {"prompt": chat("hi"), "completion": [{"role": "assistant", "content": "yo"}]},
        {"prompt": [{"role": "user", "content": "hi", "name": None}], "completion": "yo"},
    ],
)
def test_chats_go_through_the_template_and_stop_where_generation_stops(
    row: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Only the last answer is learned. Seen failing with what the template writes behind its <eos> left in."""
    assert texts(tokenizer, load(tokenizer, tmp_path, [row])) == [("u:hi.a:", "yo<eos>")]


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_tools_and_their_calls(source: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Of a table as of JSON. Seen failing with the keys of other rows' calls, as null, and without the tools."""
    rows = [
        {
            "messages": [*chat(key), {"role": "assistant", "content": "", "tool_calls": [{key: "x"}]}],
            "tools": [{key: 1}],
        }
        for key in ("a", "b")
    ]
    tokenizer.chat_template = "{{ tools[0] | length }}" + TEMPLATE.replace(
        "{% if m", "{{ m.tool_calls[0] | length if m.tool_calls }}{% if m"
    )
    path = (write_parquet if source == "parquet" else write_jsonl)(tmp_path / "rows", rows)
    found = texts(tokenizer, load_data(tokenizer, source=source, path=str(path)))
    assert found == [("1u:a.a:", "1<eos>"), ("1u:b.a:", "1<eos>")]


def test_another_day_leaves_the_checksum(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A template may write the date. Seen failing with the prompt's tokens in it, and with a row's tools left out."""
    row, checksums = {"messages": chat("hi", "yo")}, []
    others = [{"messages": chat("he", "yo")}, row | {"tools": [{"a": 1}]}, row | {"tools": '[{"a": 1}]'}]
    for date, first in (("1", row), ("2", row), *(("2", other) for other in others)):
        tokenizer.chat_template = date + TEMPLATE
        checksums.append(load(tokenizer, tmp_path, [first]).checksum)
    assert checksums[0] == checksums[1]
    assert checksums[3] == checksums[4]
    assert len(set(checksums)) == 3


def test_a_turn_end_at_which_nothing_stops_is_reported(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen failing without a warning: the model learned to write both tokens, and verifiers saw the first."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    for template, count in ((TEMPLATE, 0), (TEMPLATE.replace("<eos>{% endif %}.", "<end>{% endif %} "), 1)):
        tokenizer.chat_template = template
        load(tokenizer, tmp_path, [{"messages": chat("hi", "yo")}])
        assert caplog.text.count("ends answers with '<end>'") == count


def test_a_whole_chat_beside_its_first_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """As in UltraChat. Where there is a completion, that is learned. Seen failing with a completion asked for."""
    messages = chat("hi", "yo")
    rows = [{"prompt": "hi", "messages": messages}, {"prompt": "a", "completion": "b", "messages": messages}]
    assert texts(tokenizer, load(tokenizer, tmp_path, rows)) == [("u:hi.a:", "yo<eos>"), ("a", "b<eos>")]


@pytest.mark.parametrize("others", [{}, {"prompt": "q"}])
def test_pairs_of_whole_chats(others: dict[str, str], tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """As in UltraFeedback: what both begin with is the prompt. Seen failing with the prompt column put before them."""
    rows = [
        others | {"chosen": chat("q", "yes"), "rejected": chat("q", "no")},
        others | {"chosen": chat("q", "a", "p", "yes"), "rejected": chat("q", "a", "p", "no")},
    ]
    data = load(tokenizer, tmp_path, rows, "dpo")
    assert texts(tokenizer, data) == [("u:q.a:", "yes<eos>", "no<eos>"), ("u:q.a:a<eos>.u:p.a:", "yes<eos>", "no<eos>")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        (chat("q", "yes"), chat("p", "no"), r"got 0 in common of \['user', 'assistant'\] and \['user', 'assistant'\]"),
        (chat("q", "yes"), "no", r"got 0 in common of \['user', 'assistant'\] and \['assistant'\]"),
        (chat("q", "yes", "p"), chat("q", "yes"), "got 2 in common"),
        (chat("q", "a", "p", "b"), chat("q", "c", "p", "d"), "the completion must be one message of the assistant"),
        ("a", "a", "the two completions of a pair must differ"),
    ],
)
def test_what_is_no_pair(
    chosen: Any, rejected: Any, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(DataError, match=message):
        load(tokenizer, tmp_path, [{"prompt": "q", "chosen": chosen, "rejected": rejected}], "dpo")


@pytest.mark.parametrize("command", ["reward_model", "dpo"])
def test_pairs(command: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The chosen one first; plain and chat."""
    answer = [{"role": "assistant", "content": "good"}]
    rows = [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": chat("q"), "chosen": answer, "rejected": "bad"},
    ]
    data = load(tokenizer, tmp_path, rows, command)
    assert texts(tokenizer, data) == [("q", "yes<eos>", "no<eos>"), ("u:q.a:", "good<eos>", "bad<eos>")]


# --- datasets folders ---


def test_a_datasets_folder_of_its_own_to_evaluate_on(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Its only split is the one, whatever its name. Seen failing with it looked for under the name train."""
    import datasets

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list([{"prompt": f"q{index}", "completion": "a"} for index in range(4)])
    made.save_to_disk(str(tmp_path / "train"))
    datasets.DatasetDict({"test": made.select([0, 1])}).save_to_disk(str(tmp_path / "eval"))
    data = load_data(tokenizer, source="dataset", path=str(tmp_path / "train"), eval_path=str(tmp_path / "eval"))
    assert (len(data.train), len(data.held_out)) == (4, 2)
    with pytest.raises(DataError, match="must have a split named train, got test"):
        load_data(tokenizer, source="dataset", path=str(tmp_path / "eval"))


# --- what is held out ---


def test_held_out_prompts_are_never_trained_on(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """All rows of a prompt are on one side, for any seed. Seen failing with rows held out one by one.

    Rows of a file of their own are evenly spaced. Seen failing with the first ones.
    """
    rows = [{"prompt": f"q{index // 3}", "completion": f"a{index}"} for index in range(60)]
    data = load(tokenizer, tmp_path, rows, eval_fraction=0.2)
    train, held_out = ({tuple(example.prompt) for example in part} for part in (data.train, data.held_out))
    assert not train & held_out
    assert len(data.held_out) == 12
    assert len(data.train) == 48
    spaced = load(tokenizer, tmp_path, rows, eval_path=str(tmp_path / "rows.jsonl"), eval_size=2).held_out
    assert [tokenizer.decode(example.prompt) for example in spaced] == ["q0", "q10"]


# --- mistakes ---

GOOD = {"prompt": "q", "completion": "a"}
CHAT = chat("q", "a")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: "),
        ("[]", "a row must be a JSON object, got list"),
        ({"prompt": "q"}, "column 'completion' must hold a text or chat messages, got none"),
        ({"prompt": "", "completion": "a"}, "the prompt must hold at least one character"),
        ({"prompt": 3, "completion": "a"}, "expected a text or a list of chat messages, got 3"),
        ({"prompt": "q", "completion": "é"}, "the model's tokenizer cannot encode the character 'é'"),
        (
            {"prompt": CHAT, "completion": "a"},
            r"the prompt must end with a message to the assistant, got \['user', 'as",
        ),
        ({"prompt": "q", "completion": CHAT}, r"one message of the assistant, got \['user', 'assistant'\]"),
        ({"prompt": [{"role": "user"}], "completion": "a"}, "a chat message must be {role: text, content: text}"),
    ],
)
def test_a_broken_row_is_named_and_explained(
    row: Any, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(tokenizer, tmp_path, [GOOD, row])
    assert "1 of 2 rows" in str(caught.value)
    assert "the first is line 2" in str(caught.value)


def test_a_share_of_broken_rows_is_left_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(load(tokenizer, tmp_path, [GOOD, "{", GOOD], max_bad_fraction=0.4).train) == 2


def test_chats_need_a_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """One error of the recipe, not one of every row. Seen failing with it counted as broken rows."""
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="this one has none"):
        load(tokenizer, tmp_path, [{"messages": CHAT}], max_bad_fraction=1.0)


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="must write a prompt alike with and without its answer"):
        load(tokenizer, tmp_path, [{"messages": CHAT}])


def test_a_tokenizer_without_an_end_of_sequence(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="end-of-sequence token, its tokenizer names none"):
        load(tokenizer, tmp_path, [GOOD])


def test_too_few_rows_for_a_step(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="batch_size=32 training rows, got 1"):
        load(tokenizer, tmp_path, [GOOD], batch_size=32)


# --- rows that are too long ---

LONG = [{"prompt": "q", "completion": "abcdefgh"}, {"prompt": "q" * 10, "completion": "a"}, GOOD]


def test_a_row_that_is_too_long_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"max_context=8 tokens, got 1 of the prompt and 9 of the completion at .*:1"):
        load(tokenizer, tmp_path, LONG, max_context=8)


def test_rows_that_are_too_long_may_be_left_out_or_cut(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A cut completion has no end of sequence, which nobody wrote there; a prompt that fills all is left out."""
    assert texts(tokenizer, load(tokenizer, tmp_path, LONG, max_context=8, too_long="drop")) == [("q", "a<eos>")]
    cut = texts(tokenizer, load(tokenizer, tmp_path, LONG, max_context=8, too_long="cut"))
    assert cut == [("q", "abcdefg"), ("q", "a<eos>")]


def test_pairs_that_are_equal_once_cut_are_left_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": "q", "chosen": "abcdefghx", "rejected": "abcdefghy"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    ]
    data = load(tokenizer, tmp_path, rows, "dpo", max_context=8, too_long="cut")
    assert texts(tokenizer, data) == [("q", "a<eos>", "b<eos>")]


# --- the built-in task ---

ARITH = ArithConfig(min_terms=3, max_terms=5, max_value=9, minus_share=0.2, train_size=500, eval_size=64)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_built_in_pair_has_a_right_and_a_wrong_answer(split: Any) -> None:
    """Seen failing without the look at the last number: two slips may cancel."""
    pairs = preference_pairs(ARITH, split, carelessness=0.6)
    assert len(pairs) > 50
    for prompt, chosen, rejected in pairs:
        right = str(eval(prompt.removesuffix("=?")))
        assert chosen.endswith(f"#{right}")
        assert not rejected.endswith(f"#{right}")


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_the_built_in_task_as_rows(command: str) -> None:
    data = load_data(
        build_char_tokenizer(CHARACTERS), command, source="arith", carelessness=0.6, arith=ARITH.model_dump()
    )
    assert len(data.held_out) > 50
    assert not {tuple(example.prompt) for example in data.train} & {tuple(example.prompt) for example in data.held_out}
    assert {len(example.completions) for example in data.train} == {1 if command == "sft" else 2}
