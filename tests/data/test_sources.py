"""Sources that read files, columns and their names, filters, and the names of verifiers and workflows in rows."""

import datetime
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from source_builders import ROWS, load, load_one, recipe, source_of, write_jsonl, write_parquet

from areal_lite.config.recipe import Config
from areal_lite.data.demonstrations import PRINTABLE
from areal_lite.data.largest import largest
from areal_lite.data.prompts import load_sources
from areal_lite.data.tasks import make_task
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import ConfigError, DataError, PluginError
from areal_lite.launch.commands import eval as eval_command
from areal_lite.launch.commands.trial import Case
from areal_lite.types import Prompt
from areal_lite.verify.protocol import Reply


def write_folder(path: Path, **splits: list[dict[str, Any]]) -> Path:
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(path)
    return path


def texts(prompts: list[Any]) -> list[str]:
    return [prompt.text for prompt in prompts]


# --- kinds ---


def test_all_kinds_of_files_give_the_same_prompts(tmp_path: Path) -> None:
    """Seen failing with the rows of a folder of Parquet files read in the order of the file system, reversed."""
    sources = [
        source_of(write_jsonl(tmp_path / "rows.jsonl")),
        source_of(write_parquet(tmp_path / "rows.parquet")),
        {"source": "dataset", "path": str(tmp_path / "parts")},
        source_of(write_folder(tmp_path / "saved", train=ROWS)),
        source_of(write_parquet(tmp_path / "files" / "train.parquet").parent),
    ]
    for number, row in enumerate(ROWS):
        write_parquet(tmp_path / "parts" / f"part-{number}.parquet", [row])
    expected = load_one(sources[0])
    assert [(prompt.text, prompt.answer, dict(prompt.row)) for prompt in expected] == [
        (row["question"], row["answer"], {"level": row["level"], "tag": row["tag"]}) for row in ROWS
    ]
    assert [prompt.prompt_id for prompt in expected] == ["train/0/0", "train/0/1", "train/0/2"]
    for source in sources[1:]:
        assert load_one(source) == expected


def test_held_out_rows_come_from_their_own_path_or_a_datasets_own_split(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "saved", train=ROWS, test=ROWS[2:])
    other = str(write_parquet(tmp_path / "other.parquet", ROWS[:2]))
    assert texts(load_one(source_of(folder), "eval")) == ["13+29=?"]
    assert texts(load_one(source_of(Path(other)), "eval")) == []
    parquet = {"source": "parquet", "path": other, "eval_path": other, "eval_size": 1}
    assert [(prompt.prompt_id, prompt.text) for prompt in load_one(parquet, "eval")] == [("eval/0/0", "1+1=?")]


def test_of_a_folder_of_parquet_files_the_held_out_ones_train_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The hub's layout, and folders by split; a single file is read whole. Seen failing with all files read."""
    hub = write_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet", ROWS[:2]).parent
    write_parquet(hub / "test-00000-of-00001.parquet", ROWS[2:])
    folders = write_parquet(tmp_path / "by" / "train" / "0.parquet", ROWS[:2]).parents[1]
    write_parquet(folders / "validation" / "0.parquet", ROWS[2:])
    for folder in (hub, folders):
        assert texts(load_one(source_of(folder))) == ["1+1=?", "2+2=?"]
        assert texts(load_one(source_of(folder), "eval")) == ["13+29=?"]
    with pytest.raises(DataError, match=r"needs a Parquet file, there is none at .*hub: .*data\.source=dataset"):
        load_one({"source": "parquet", "path": str(hub)})
    exam = str(write_parquet(tmp_path / "exam.parquet", ROWS[1:]))
    assert texts(load_one({"source": "parquet", "path": exam, "eval_path": exam})) == ["2+2=?", "13+29=?"]
    assert "the rows that evaluate the model train it" in caplog.text


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), [1.0, float("nan")]])
def test_an_answer_that_is_no_finite_number_is_a_broken_row(answer: Any, tmp_path: Path) -> None:
    """As pandas writes an empty cell. Seen failing with the answer "nan", which a completion can equal."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": answer}])
    with pytest.raises(DataError, match="'answer' must hold a text or a finite number"):
        load_one(source_of(path))


def test_an_answer_may_be_a_whole_number_of_any_length(tmp_path: Path) -> None:
    """Only its text travels. Seen failing with the number itself encoded, which holds 64 bits at most."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": [10**30, 7]}])
    (prompt,) = load_one(source_of(path))
    assert (prompt.answer, prompt.row["reference_answers"]) == (str(10**30), [str(10**30), "7"])


def test_a_hub_id_is_loaded_by_name_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name stays as it is: record/test_paths.py."""
    asked: list[Any] = []

    def load_dataset(*arguments: Any) -> Any:
        asked.append(arguments)
        return datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts(load_one({"source": "dataset", "path": "someone/sums:main"})) == [row["question"] for row in ROWS]
    assert asked == [("someone/sums", "main")]


def test_a_hub_that_does_not_answer_is_an_error_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*arguments: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"no/such is no folder, and cannot be loaded .*ConnectionError: no network"):
        load_one({"source": "dataset", "path": "no/such"})


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"none at {tmp_path}/x.parquet: correct data.path"):
        load_one(source_of(tmp_path / "x.parquet"))
    (tmp_path / "y.parquet").write_bytes(b"no such thing")
    with pytest.raises(DataError, match=r"y\.parquet is not readable as Parquet"):
        load_one(source_of(tmp_path / "y.parquet"))
    with pytest.raises(DataError, match="holds no rows"):
        load_one(source_of(write_parquet(tmp_path / "z.parquet", [])))


# --- columns ---


def test_columns_get_new_names(tmp_path: Path) -> None:
    """A swap works too. Seen failing with columns renamed one after another."""
    path = write_jsonl(tmp_path / "rows.jsonl")
    (first, *_) = load_one(source_of(path, columns={"difficulty": "level"}))
    assert first.row == {"difficulty": 1, "tag": "a"}
    (first, *_) = load_one(source_of(path, columns={"tag": "level", "level": "tag"}))
    assert first.row == {"tag": 1, "level": "a"}


def test_a_column_that_is_not_there_or_taken_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"no column 'levle'.*set data\.columns\.difficulty; did you mean level\?"):
        load_one(source_of(path, columns={"difficulty": "levle"}))
    with pytest.raises(DataError, match=r"a column 'tag' already, which data\.columns gives to another"):
        load_one(source_of(path, columns={"tag": "level"}))
    with pytest.raises(DataError, match=r"set data\.mix\.one\.prompt_column"):
        load(recipe(data={"mix": {"one": source_of(path, prompt_column="text")}}))


@pytest.mark.parametrize("name", ["prompt", "completion", "messages"])
def test_a_column_named_like_a_verifiers_argument_is_refused(name: str, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", [{**ROWS[0], name: "x"}])
    with pytest.raises(DataError, match=f"column '{name}' has the name of a verifier argument: rename it"):
        load_one(source_of(path))
    assert load_one(source_of(path, columns={"mine": name}))[0].row["mine"] == "x"


@pytest.mark.parametrize("value", [datetime.date(2024, 2, 29), b"image"])
def test_what_cannot_travel_names_its_column_and_row(value: Any, tmp_path: Path) -> None:
    """Dates of a table are no plain values. Seen failing without the check, which left it to the first message or, of
    bytes, to samples.jsonl."""
    path = write_parquet(tmp_path / "rows.parquet", [{**ROWS[0], "other": value}])
    named = type(value).__name__
    with pytest.raises(DataError, match=rf"first is row 0: column 'other' holds what cannot travel .*{named}"):
        load_one(source_of(path))


def test_numbers_of_numpy_are_plain_numbers_in_a_row() -> None:
    """Seen failing with an evaluation, whose rows are pickled, in which msgpack refused np.int64."""
    row = {"question": "q", "answer": "a", "level": np.int64(3)}
    task = make_task(row, origin="here", prompt_column="question", answer_column="answer")
    assert type(task.row["level"]) is int


def test_an_empty_cell_of_a_column_with_a_meaning_is_none(tmp_path: Path) -> None:
    """A table has every column in every row. Seen failing with empty cells kept: `None` is no limit."""
    rows = [{**ROWS[0], "max_new_tokens": 5, "verifier": "exact"}, ROWS[1]]
    first, second = load_one(source_of(write_parquet(tmp_path / "rows.parquet", rows)))
    assert (first.row["max_new_tokens"], first.row["verifier"]) == (5, "exact")
    assert second.row == {"level": 2, "tag": "b"}


# --- filters ---


def test_filters_leave_rows_out_and_say_how_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The longest prompt allowed is in. Seen failing with `<` for `<=`."""
    path = write_jsonl(tmp_path / "rows.jsonl")
    with caplog.at_level(logging.INFO):
        kept = load_one(source_of(path, max_prompt_tokens=5))
    assert texts(kept) == ["1+1=?", "2+2=?"]
    assert [prompt.prompt_id for prompt in kept] == ["train/0/0", "train/0/1"]
    assert [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()] == [
        "data.max_prompt_tokens=5 leaves out 1 of 3 rows",
    ]


def test_held_out_rows_are_counted_behind_the_filters(tmp_path: Path) -> None:
    """Seen failing with `eval_size` applied before the lengths were known."""
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[::-1])
    data = source_of(path, eval_path=str(path), eval_size=1, max_prompt_tokens=5)
    assert texts(load_one(data, "eval")) == ["2+2=?"]


def test_held_out_rows_are_evenly_spaced_and_what_a_source_makes_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file may be sorted. Seen failing with its first rows, and with the sources' own sizes cut to 256; silently."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": f"{n}", "answer": "1"} for n in range(300)])
    data = source_of(path, eval_path=str(path))
    with caplog.at_level(logging.INFO):
        assert texts(load_one({**data, "eval_size": 4}, "eval")) == ["0", "75", "150", "225"]
    assert "data.eval_size: 4 of 300 held-out rows are used, evenly spaced" in caplog.text
    assert len(load_one(data, "eval")) == 256
    assert len(load_one({"source": "arith", "arith": {"train_size": 4, "eval_size": 300}}, "eval")) == 300


# --- verifiers and workflows of rows ---

NAMED = {
    "verifier": {"named": {"mine": {"function": "my.py:f"}}},
    "rollout": {"workflows": {"game": {"function": "g:f"}}},
}


def test_a_source_names_verifier_and_workflow_where_a_row_does_not(tmp_path: Path) -> None:
    """Seen failing with the source's word put over the row's own."""
    path = write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], "verifier": "exact", "workflow": "single_turn"}])
    first, second = load_one(source_of(path, verifier="mine", workflow="game"), **NAMED)
    assert (first.row["verifier"], first.row["workflow"]) == ("mine", "game")
    assert (second.row["verifier"], second.row["workflow"]) == ("exact", "single_turn")
    plain = load_one(source_of(write_jsonl(tmp_path / "plain.jsonl")))
    assert all(prompt.row.keys() == {"level", "tag"} for prompt in plain)


@pytest.mark.parametrize(
    ("column", "name", "message"),
    [
        ("verifier", "os:system", "got 'os:system' at .*2: data must not choose code; give .* name in verifier.named"),
        ("workflow", "x.py:f", "got 'x.py:f' at .*2: data must not choose code; give .* name in rollout.workflows"),
        ("verifier", "exakt", r"got 'exakt' at .*rows\.jsonl:2; did you mean exact\?"),
        ("workflow", 3, "the column workflow must hold one of .*single_turn.*, got 3 at"),
    ],
)
def test_a_row_may_only_name_what_is_known(column: str, name: Any, message: str, tmp_path: Path) -> None:
    """Seen failing without the check of names, which left it to the worker that gets the row."""
    path = write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], column: name}])
    with pytest.raises(DataError, match=message):
        load_one(source_of(path), **NAMED)


def test_an_evaluation_with_a_verifier_of_its_own_takes_rows_that_name_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source too. Seen failing with the rows checked against the verifiers that the evaluation asks."""
    build_char_tokenizer(PRINTABLE).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{**ROWS[0], "verifier": "mine"}]))
    sections = NAMED | {"verifier": {**NAMED["verifier"], "eval_function": "exact"}}
    config = recipe(data={"source": "jsonl", "path": path, "eval_path": path, "verifier": "mine"}, **sections)

    def generated(_: Config, prompts: Sequence[Prompt], __: str) -> list[Case]:
        return [Case(index=0, prompt=prompts[0], completion="2", reply=Reply(1.0))]

    monkeypatch.setattr(eval_command, "_in_a_process_of_its_own", generated)
    (case,) = eval_command.evaluate(config, model=str(tmp_path / "model"))
    assert (case.completion, case.reply) == ("2", Reply(1.0))


# --- several sources ---


def test_a_mix_keeps_its_sources_apart_by_their_ids(tmp_path: Path) -> None:
    """Held-out prompts of each, up to its own `eval_size`. Seen failing with ids `eval/0/index` in a mix."""
    path = str(write_jsonl(tmp_path / "rows.jsonl"))
    mix = {
        "sums": {"source": "arith", "eval_size": 2, "arith": {"train_size": 4, "eval_size": 3}},
        "mine": {"source": "jsonl", "path": path, "eval_path": path, "eval_size": 1},
        "blind": {"source": "jsonl", "path": path},
    }
    config = recipe(data={"mix": mix})
    train, held_out = load(config), load(config, "eval")
    assert {name: len(prompts) for name, prompts in train.items()} == {"sums": 4, "mine": 3, "blind": 3}
    assert [prompt.prompt_id for prompt in train["mine"]] == ["mine/0/0", "mine/0/1", "mine/0/2"]
    ids = {name: [prompt.prompt_id for prompt in prompts] for name, prompts in held_out.items()}
    assert ids == {"sums": ["sums/eval/0", "sums/eval/1"], "mine": ["mine/eval/0"], "blind": []}


VERL_ROWS = [
    {
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"{n}+1=?"}],
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n},
    }
    for n in range(3)
]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_and_columns_inside_columns(kind: str, tmp_path: Path) -> None:
    """Rows as verl and TRL have them, recognised as chats; a system message goes before those that have none.

    Without a chat it is refused: config/test_checks.py.

    Seen failing with lists refused as prompts, with dots read as one name, and with two system messages, and without
    the messages as a column.
    """
    path = (write_parquet if kind == "parquet" else write_jsonl)(tmp_path / f"rows.{kind}", VERL_ROWS)
    source = source_of(path, prompt_column="prompt", answer_column="reward_model.ground_truth", system="be kind")
    source["columns"] = {"number": "extra_info.index"}
    tokenizer = build_char_tokenizer(PRINTABLE)
    tokenizer.chat_template = TEMPLATE
    (prompts,) = load_sources(recipe(data=source), tokenizer, "train").values()
    assert [prompt.text for prompt in prompts] == [f"s:be brief;u:{n}+1=?;a:" for n in range(3)]
    assert [prompt.answer for prompt in prompts] == ["1", "2", "3"]
    assert [prompt.row["number"] for prompt in prompts] == [0, 1, 2]
    assert [prompt.row["prompt_messages"] for prompt in prompts] == [row["prompt"] for row in VERL_ROWS]
    rows = [
        {"prompt": f"{n}+1=?", "reward_model": {"ground_truth": [n, "n"]}, "extra_info": {"index": n}} for n in (1, 2)
    ]
    plain = write_jsonl(tmp_path / "plain.jsonl", rows)
    source |= {"source": "jsonl", "path": str(plain)}
    (prompts,) = load_sources(recipe(data=source | {"chat": True}), tokenizer, "train").values()
    assert [prompt.text for prompt in prompts] == [f"s:be kind;u:{n}+1=?;a:" for n in (1, 2)]
    assert [one["content"] for one in prompts[0].row["prompt_messages"]] == ["be kind", "1+1=?"]
    assert [(prompt.answer, prompt.row["reference_answers"]) for prompt in prompts] == [
        ("1", ["1", "n"]),
        ("2", ["2", "n"]),
    ]
    write_jsonl(plain, [rows[0], VERL_ROWS[0]])
    with pytest.raises(DataError, match=r"a list of chat messages, others are plain texts: set data\.chat=true"):
        load_sources(recipe(data=source | {"system": None}), tokenizer, "train")


def price(fruit: str) -> int:
    """Return the price of a fruit.

    Args:
        fruit: Its name.
    """
    return 3


def test_a_chat_template_tells_the_model_of_tools(tmp_path: Path) -> None:
    """Seen failing with tools not handed to the template, and with a template that is silent about them."""
    source = source_of(write_jsonl(tmp_path / "rows.jsonl"), chat=True, tools=["test_sources:price"])
    tokenizer = build_char_tokenizer(PRINTABLE)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + TEMPLATE
    (prompts,) = load_sources(recipe(data=source), tokenizer, "train").values()
    told = json.loads(prompts[0].text.partition("u:")[0])["function"]
    assert (told["name"], told["description"]) == ("price", "Return the price of a fruit.")
    assert told["parameters"]["properties"] == {"fruit": {"type": "string", "description": "Its name."}}
    with pytest.raises(ConfigError, match=r"data\.tools need a chat template.*set data\.chat=true"):
        load_sources(recipe(data=source | {"chat": False}), tokenizer, "train")
    with pytest.raises(PluginError, match=r"functions with types and a docstring that has Args, got math:sqrt"):
        load_sources(recipe(data=source | {"tools": ["math:sqrt"]}), tokenizer, "train")
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(ConfigError, match=r"it leaves price out: describe them in data\.system"):
        load_sources(recipe(data=source), tokenizer, "train")


def test_more_questions_than_there_are_is_an_error() -> None:
    """There are 90 two-digit numbers, and 90 * 89 pairs. Seen failing: it drew forever."""
    assert len(largest("train", count=2, train_size=8000, eval_size=10)) == 8000
    for settings in ({"count": 1}, {"count": 2, "train_size": 8001, "eval_size": 10}):
        with pytest.raises(ConfigError, match="raise count, or lower train_size"):
            largest("train", **settings)
