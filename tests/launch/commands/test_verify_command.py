"""`areal-lite verify`: what it reads, what it says of a verifier, and how it ends."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import FIXTURES
from user_run import UserRun, adopting_orphans

from areal_lite.config.recipe import load_config
from areal_lite.data.demonstrations import PRINTABLE
from areal_lite.data.prompts import load_sources
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import DataError
from areal_lite.launch.commands import main as cli
from areal_lite.launch.commands.trial import load_cases, load_rows
from areal_lite.types import Prompt

MOODY = f"{FIXTURES / 'tried_verifiers.py'}:moody"


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four rows in the present folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return write_lines(tmp_path / "data.jsonl", *({"question": f"q{n}", "answer": str(n)} for n in range(4)))


def prompts(*texts: str) -> list[tuple[str, Prompt]]:
    """In a run's template."""
    return [
        (text, Prompt(prompt_id=f"verify/0/{n}", text=f"Q: {text}", token_ids=(), answer=f"a{n}"))
        for n, text in enumerate(texts)
    ]


def joined(tmp_path: Path, *rows: Any) -> list[tuple[int, str]]:
    cases = load_cases(prompts("q0", "q1", "q2"), write_lines(tmp_path / "c.jsonl", *rows))
    return [(case.index, case.completion) for case in cases]


def test_completions_are_joined_by_index_else_by_prompt_else_by_line(tmp_path: Path) -> None:
    """Seen failing with row 0 for every line without an index."""
    rows = [{"completion": "x", "index": 2}, {"completion": ["y", "z"]}, {"completion": "p", "prompt": "q0"}]
    assert joined(tmp_path, *rows) == [(2, "x"), (1, "y"), (1, "z"), (0, "p")]
    assert joined(tmp_path, {"completion": "x", "prompt": "q0", "index": 1}) == [(1, "x")]
    assert [case.completion for case in load_cases(prompts("q0", "q1"), None)] == ["a0", "a1"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"completion": "x", "index": 3}, "one of the 3 rows of the data, got 3"),
        ({"completion": "x", "prompt": "other"}, "got that of 0: 'other'"),
        ({"completion": 7}, "a text or a list of texts as completion, got 7"),
        ({"completions": "x"}, "must have a completion, it has completions; did you mean completions"),
    ],
)
def test_a_completion_that_belongs_nowhere_is_named_by_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        joined(tmp_path, row)


@pytest.mark.slow
def test_scores_failures_and_latencies_of_a_moody_verifier(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of 1, 2 and 4, each with a bonus of 1: rewards 1.5, 2 and 3. One raises and one hangs, so it ends with 1.

    Seen failing with a failed call that counts as a reward of 0, and with arguments that are not passed on.
    """
    write_lines(
        data.with_name("c.jsonl"), {"completion": ["1", "2"]}, {"completion": "raise"}, {"completion": ["4", "hang"]}
    )
    settings = "verifier.timeout_s=3 verifier.processes=2 verifier.arguments.bonus=1"
    command = f"verify {MOODY} {settings} --data data.jsonl --completions c.jsonl --json out.json"
    assert cli.main(command.split()) == 1
    output = capsys.readouterr().out
    for shown in ("3 scored, 2 failed", "1 failed: exception:ValueError", "no q1 please", "1 failed: timeout", "p99"):
        assert shown in output
    report = json.loads(data.with_name("out.json").read_text())
    assert report["reward"]["mean"] == 6.5 / 3
    assert report["parts"] == {"half": 3.5 / 3}
    assert report["metrics"] == {"length": 1.0}
    assert {name: item["count"] for name, item in report["failures"].items()} == {
        "exception:ValueError": 1,
        "timeout": 1,
    }
    assert [item["reward"] for item in report["lowest"]] == [1.5, 2.0]
    assert [(row["index"], row["reward"]) for row in report["results"]] == [
        (0, 1.5), (0, 2.0), (1, None), (2, 3.0), (2, None)
    ]  # fmt: skip
    (gauges,) = report["verifiers"].values()
    assert (gauges["calls"], gauges["timeouts"], gauges["restarts"]) == (5, 1, 1)
    assert gauges["latency_p99_s"] >= 3 > gauges["latency_p50_s"]


def test_a_recipe_is_tried_with_its_sum_and_the_choice_of_its_rows(tmp_path: Path) -> None:
    """Rows 0 and 1: 1 * exact + 0.5 * last_number = 1.5 and 0.5. Row 2 chooses the named `half`: 3 / 2 + 1.

    Seen failing with `run.env` for a run's processes alone, with the column verifier left out, as it is for a single
    verifier, and with question and answer as the only names of columns.
    """
    verifier = {"function": {"exact": 1.0, "last_number": 0.5}, "named": {"half": {"function": MOODY}}}
    recipe, file = tmp_path / "recipe.yaml", tmp_path / "d.jsonl"
    data = {"source": "jsonl", "path": str(file), "prompt_column": "problem", "answer_column": "truth"}
    recipe.write_text(yaml.safe_dump({"data": data, "verifier": verifier, "run": {"env": {"TRIED_BONUS": "1"}}}))
    rows = [{"problem": "p", "truth": "7"}, {"problem": "p", "truth": "7"}]
    write_lines(file, *rows, {"problem": "p", "truth": "9", "verifier": "half"})
    completions = write_lines(tmp_path / "c.jsonl", *({"completion": text} for text in ("7", "so 7", "3")))
    out = tmp_path / "out.json"
    words = ["verify", recipe, "--data", file, "--completions", completions, "--json", out]
    assert cli.main(list(map(str, words))) == 0
    report = json.loads(out.read_text())
    assert [row["reward"] for row in report["results"]] == [1.5, 0.5, 2.5]
    assert report["parts"]["exact"] == 0.5
    assert set(report["verifiers"]) == {"exact", "last_number", "half"}
    # A verifier alone scores every row, whatever it says.
    columns = ["data.prompt_column=problem", "data.answer_column=truth"]
    assert cli.main(list(map(str, ["verify", "exact", *columns, *words[2:]]))) == 0
    assert [row["reward"] for row in json.loads(out.read_text())["results"]] == [1.0, 0.0, 0.0]


def test_a_recipe_alone_is_tried_on_the_rows_that_it_trains_on(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every source with its own verifier. Seen failing with the first source alone, and without their verifiers."""
    mix = {
        "mine": {"source": "jsonl", "path": "data.jsonl", "verifier": "exact"},
        "sums": {"source": "arith", "arith": {"train_size": 2}},
    }
    data.with_name("recipe.yaml").write_text(yaml.safe_dump({"data": {"mix": mix}}))
    write_lines(data, *({"question": f"q{n}", "answer": f"word {n}", "n": n} for n in range(2)))
    assert cli.main(["verify", "recipe.yaml", "--json", "out.json"]) == 0
    report = json.loads(data.with_name("out.json").read_text())
    assert [row["reward"] for row in report["results"]] == [1.0] * 4
    assert {name: gauges["calls"] for name, gauges in report["verifiers"].items()} == {"exact": 2, "last_number": 2}
    assert cli.main(["verify", "exact"]) == 1
    assert "--data must name the file with the rows to try exact on, got none" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["model", "of/hub", "of/parts", "not/here"])
def test_a_verifier_is_shown_the_prompts_that_it_gets_in_a_run(
    model: str, data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of chats and of texts; where the model is not here, nor downloaded, a chat in a plain form, and that is said.

    Seen failing with the empty text of a chat, without the system message, without the texts' template, without the
    word, and with what was downloaded passed over, or taken where the
    tokenizer is not among it. Completions name prompts as the data or as the run has them: seen
    failing without either.
    """
    tokenizer = build_char_tokenizer(PRINTABLE)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    hub = data.with_name("hub") / "models--of--hub"
    for folder in (data.with_name("model"), hub / "snapshots" / "abc"):
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text("{}")
    (parts := hub.with_name("models--of--parts") / "snapshots" / "abc").mkdir(parents=True)
    (parts / "config.json").write_text("{}")
    for refs in (hub / "refs", parts.parents[1] / "refs"):
        refs.mkdir()
        (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.parent))
    write_lines(data.with_name("chats.jsonl"), {"question": [{"role": "user", "content": "q0"}], "answer": "0"})
    mix = {
        "chats": {"source": "jsonl", "path": "chats.jsonl", "system": "Be brief."},
        "texts": {"source": "jsonl", "path": "data.jsonl", "template": "Q: {prompt}"},
    }
    data.with_name("recipe.yaml").write_text(yaml.safe_dump({"data": {"mix": mix}, "model": {"path": model}}))
    is_here = model not in ("of/parts", "not/here")
    rows = load_rows(load_config("recipe.yaml"))
    assert ("these prompts are chats: the verifier gets a line" in caplog.text) == (not is_here)
    trained = [
        one for prompts in load_sources(load_config("recipe.yaml"), tokenizer, "train").values() for one in prompts
    ]
    text = "<system>Be brief.<user>q0" if is_here else "system: Be brief.\nuser: q0"
    assert [prompt.text for _, prompt in rows] == [text, *(f"Q: q{n}" for n in range(4))]
    assert not is_here or [one.text for one in trained] == [prompt.text for _, prompt in rows]
    assert [prompt.row for _, prompt in rows] == [one.row for one in trained]
    completions = write_lines(data.with_name("c.jsonl"), *({"completion": "x", "prompt": one} for one in (text, "q1")))
    assert [case.index for case in load_cases(rows, completions)] == [0, 2]
    assert cli.main(["verify", "exact", "--data", "chats.jsonl"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("last_numbr --data data.jsonl", "did you mean last_number?"),
        ("arith_cp --data data.jsonl", "did you mean arith_cpu?"),
        ("here.py:verify --data data.jsonl", "there is no file"),
        ("last_number --data data.jsonl --completions dat.jsonl", "--completions must name a JSONL file"),
        ("last_number data.answer_column=anser --data data.jsonl", "set data.answer_column; did you mean answer?"),
        ("my_mod.verify --data data.jsonl", "did you mean my_mod:verify?"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    words: str, message: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", *words.split()]) == 1
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_ctrl_c_shows_what_there_is_so_far(tmp_path: Path) -> None:
    """Seen failing with the interrupt passed on: `stopped`, and nothing else."""
    write_lines(tmp_path / "data.jsonl", *[{"question": "q", "answer": "a"}] * 2000)
    command = ["areal-lite", "verify", MOODY.replace("moody", "slow"), "--data", "data.jsonl"]
    with adopting_orphans(), UserRun(command, run_folder=tmp_path / "none") as run:
        run.wait_until(lambda: re.search(r"[1-9]\d*/2000", run.output) is not None, "scores")
        run.press_ctrl_c()
        run.ends_with(130)
        assert "of 2000 completions" in run.output
        assert "100.00%" in run.output
        assert "Traceback" not in run.output


@pytest.mark.data
def test_gsm8k_gold_solutions_satisfy_math(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The columns are found by default: `question`, and `answer`, the worked solution that ends in `#### 72`."""
    file = Path(os.environ["AREAL_LITE_GSM8K_DIR"]) / "test.jsonl"
    assert cli.main(["verify", "math", "--data", str(file), "--limit", "100", "verifier.processes=2"]) == 0
    output = capsys.readouterr().out
    assert "100 scored, 0 failed" in output
    assert "100.00%" in output
