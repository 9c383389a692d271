"""Run every snippet of the pages in `RUN`.

A block that begins with `# name.ending` is a file of one folder, as the reader would make it. `check_name` below calls
the Python file `name.py` on an example; each recipe is loaded, and each shell line is run in this process; `train`
becomes `check-config`.
"""

import asyncio
import contextlib
import io
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
from episode_builders import TOKENIZER, Speaker, load, make_prompt, play
from pages import RUN as PAGES
from pages import blocks
from places import ROOT
from train_builders import save_tiny_model
from transformers import PreTrainedTokenizerFast

from areal_lite.config.plugins import find_function, split_name
from areal_lite.config.recipe import load_config
from areal_lite.config.verifier import VerifierSettings
from areal_lite.data.prompts import load_source, load_sources
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import VerifierUnavailable
from areal_lite.launch.commands.main import main
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.gymnasium import rows as gymnasium_rows
from areal_lite.verify.protocol import Verifier
from areal_lite.verify.verifier_set import VerifierSet

ROWS = [
    {"question": "A hall has 40 rows of 35 seats. How many is that?", "answer": "40*35 = 1400\n#### 1400", "level": 2},
    {"question": "7+25=?", "answer": "32", "level": 1},
    {"question": "What is 9*9*9?", "answer": "#### 729", "level": 5},
]
SPLITS: tuple[Literal["train"], Literal["eval"]] = ("train", "eval")
SHOWN_ONLY = re.compile(r"python |areal-lite verify judge\.yaml")
"""A server that never ends, and what asks it: the judge's own tests run both."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader's folder holds after all pages, and the files that they take for granted."""
    folder = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        for block in blocks(page):
            if block.file is not None:
                assert not (folder / block.file).exists(), f"two blocks are {block.file}"
                (folder / block.file).write_text(block.text)
    others = ({"problem": row["question"], "info": {"solution": row["answer"]}} for row in ROWS)
    lines = "".join(json.dumps(row | other) + "\n" for row, other in zip(ROWS, others, strict=True))
    for name in ("data.jsonl", "train.jsonl", "eval.jsonl"):
        (folder / name).write_text(lines)
    for name in ("problems.jsonl", "held_out.jsonl"):
        (folder / name).write_text('{"problem": "7+25=?", "info": {"solution": 32}}\n')
    (folder / "completions.jsonl").write_text("".join(json.dumps({"completion": row["answer"]}) + "\n" for row in ROWS))
    for name, block in zip(("trl", "verl", "openrlhf"), blocks("first.md", "json"), strict=True):
        (folder / f"{name}_rows.jsonl").write_text(json.dumps(json.loads(block.text)) + "\n")
    (folder / "words.txt").write_text("the cat sat")
    save_tiny_model(folder / "model", max_context=8192, tokenizer=chat_tokenizer())
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = list(sys.path)
    monkeypatch.chdir(folder)
    yield
    sys.path[:] = before


def scored(name: str, completion: str, reference: str = "", **arguments: Any) -> Any:
    """Return the reply of a verifier's process."""
    function = find_function(name, kind="verifier")
    (reply,) = Verifier(function, arguments).answer([("a prompt", completion, reference, {})])
    assert reply.failure is None or reply.failure == "unavailable", reply
    return reply


def check_my_verifier() -> None:
    assert scored("my_verifier.py:verify", "7+25=32#32", "so 32 #### 32").reward == 1.0
    assert scored("my_verifier.py:verify", "7+25=33#33", "32").reward == 0.0


def check_close() -> None:
    assert scored("close.py:verify", "2.5", "2").reward == 0.0
    assert scored("close.py:verify", "2.5", "2", tolerance=0.5).reward == 1.0


def check_dictionary() -> None:
    assert scored("dictionary.py:verify", "The cat flew", words="words.txt").reward == pytest.approx(2 / 3)


def check_steps() -> None:
    """Lines end before characters 4, 6 and 9; the first and the last but one end in a full stop."""
    reply = scored("steps.py:verify", "Yes.\nNo\nSo.\n9", "9")
    assert (reply.reward, [*map(tuple, reply.step_rewards)]) == (1.0, [(5, 0.1), (12, 0.1)])
    assert (dict(reply.parts), reply.feedback) == ({"right": 1.0, "lines": 0.2}, "2 good lines")


def check_lengths() -> None:
    function = find_function("lengths.py:verify", kind="verifier")
    calls = [("p", completion, "", {}) for completion in ("x", "x" * 50)]
    assert [reply.reward for reply in Verifier(function, {}).answer(calls)] == [0.99, 0.5]


def check_service() -> None:
    function = find_function("service.py:verify", kind="verifier")
    with pytest.raises(VerifierUnavailable, match="does not answer"):
        function("p", "c", "a", url="http://127.0.0.1:9/")


def check_hints() -> None:
    """Two wrong words, then the right one, each after the environment's text on the page."""
    engine = Speaker(["5", "6", "7"])
    sample = play(engine, load("multi_turn", arguments={"step": "hints.py:step"}), make_prompt(answer="7"))
    assert [message["content"] for message in sample.messages] == [
        "5", "\nNot 5. Try again:", "6", "\nNot 6. Try again:", "7"
    ]  # fmt: skip


def check_shop() -> None:
    """The conversation that the page shows, call by call."""
    (shown,) = blocks("workflows.md", "")
    pairs = [re.split(r" +(?=<)", line) for line in shown.text.splitlines()]
    engine = Speaker([*(call for call, _ in pairs), "3"])
    workflows = load("tools", arguments={"functions": ["shop.py:price"]})
    sample = play(engine, workflows, sampling=Sampling(max_new_tokens=500, temperature=1.0))
    assert [message["content"] for message in sample.messages[1::2]] == [reply for _, reply in pairs]


def check_thermostat() -> None:
    (row, *_) = gymnasium_rows("train", env="thermostat.py:Thermostat", train_size=1)
    workflows = load("gymnasium", arguments={"env": "thermostat.py:Thermostat", "max_turns": 10, "max_turn_tokens": 4})
    engine = Speaker(lambda text: "up" if int(text[-3:-1]) < 20 else "down")
    steps = abs(int(row["question"][:-1]) - 20) or 2
    assert play(engine, workflows, make_prompt(row["question"], seed=row["seed"])).total_reward == pytest.approx(
        1 - 0.1 * (steps - 1)
    )


def check_second_thoughts() -> None:
    sample = play(Speaker(["7", "8"]), load("second_thoughts.py:episode", arguments={"remark": "?"}))
    assert [(message["role"], message["content"]) for message in sample.messages] == [
        ("assistant", "7"), ("environment", "?"), ("assistant", "8")
    ]  # fmt: skip


def check_squares() -> None:
    train, held_out = (load_sources(load_config("squares.yaml"), TOKENIZER, split)["rows"] for split in SPLITS)
    assert (len(train), train[0].text, train[0].answer, train[0].prompt_id) == (49, "1*1=?", "1", "train/0/0")
    assert [prompt.answer for prompt in held_out] == [str(n * n) for n in range(50, 70)]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = build_char_tokenizer("".join(map(chr, range(10, 127))))
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    return tokenizer


def tried(name: str) -> list[tuple[float, dict[str, float]]]:
    """Score the answer of a page's row with its recipe, as a run would; and a wrong one."""
    config = load_config(f"from_{name}.yaml")
    (prompt,) = load_source(config, chat_tokenizer(), "train")

    async def score() -> list[Any]:
        verifiers = VerifierSet(config.verifier)
        try:
            return await verifiers.score(prompt, ["#### 32" if name == "verl" else "32", "31"])
        finally:
            await verifiers.close()

    shown = {"trl": "user:7+25=?;", "openrlhf": "system:Answer with a number.;user:7+25=?;"}
    assert prompt.text == shown.get(name, prompt.text)
    return [(reply.reward, dict(reply.metrics or reply.parts)) for reply in asyncio.run(score())]


def check_trl_rewards() -> None:
    """Accuracy and a tenth for brevity; the latter alone where the row is of another task, and None for what it is."""
    assert tried("trl") == [(1.1, {"accuracy": 1.0, "brief": 1.0}), (0.1, {"accuracy": 0.0, "brief": 1.0})]
    path = Path("trl_rows.jsonl")
    before = path.read_text()
    path.write_text(before.replace("sums", "words"))
    assert tried("trl") == [(1.0, {"accuracy": 1.0}), (0.0, {"accuracy": 0.0})]
    path.write_text(before)


def check_verl_reward() -> None:
    assert tried("verl") == [(1.0, {"has_format": 1.0}), (0.0, {"has_format": 0.0})]


def check_openrlhf_reward() -> None:
    assert tried("openrlhf") == [(1.0, {"length": 2.0}), (0.0, {"length": 2.0})]


def check_my_task() -> None:
    train, held_out = (load_sources(load_config("my_task.yaml"), TOKENIZER, split)["rows"] for split in SPLITS)
    assert (len(train), len(held_out)) == (500, 100)
    assert scored("my_task.py:verify", "1+2=3;3+3=6#6", "6").reward == pytest.approx(1 - 0.26)


def check_my_agent() -> None:
    """Seen failing, as the program below, with another part of the answer compared on the page."""

    async def create(**asked: Any) -> SimpleNamespace:
        return SimpleNamespace(choices=[SimpleNamespace(text=f"{asked['prompt']}1+2=3#3")])

    llm = SimpleNamespace(model="m", client=SimpleNamespace(completions=SimpleNamespace(create=create)))
    agent = find_function("my_agent.py:agent", kind="workflow")
    assert [asyncio.run(agent({"prompt": "1+2=?", "answer": answer}, llm)) for answer in "34"] == [1.0, 0.0]


def check_my_program() -> None:
    reply = SimpleNamespace(choices=[SimpleNamespace(text="1+2=3#3")])
    task, shown = io.StringIO('{"prompt": "1+2=?", "answer": "3"}\n'), io.StringIO()
    with (
        mock.patch("openai.OpenAI") as client, mock.patch.dict("os.environ", OPENAI_MODEL="m"),
        mock.patch("sys.stdin", task), contextlib.redirect_stdout(shown),
    ):  # fmt: skip
        client.return_value.completions.create.return_value = reply
        runpy.run_path("my_program.py")
    assert shown.getvalue() == "1.0\n"


CALLS = {
    f"{name.removeprefix('check_')}.py": check for name, check in [*globals().items()] if name.startswith("check_")
}
"""The functions above by the file that they check."""


@pytest.mark.parametrize("file", CALLS)
def test_a_python_file_of_the_pages_works(file: str) -> None:
    CALLS[file]()


def test_every_python_block_is_called_here() -> None:
    """Those without a file's name are typed by test_api.py. Seen failing with a new block on the page."""
    found = [block.file for page in PAGES for block in blocks(page, "python")]
    assert {file for file in found if file is not None} == CALLS.keys()


def recipes() -> list[str]:
    return [str(block.file) for page in PAGES for block in blocks(page, "yaml")]


@pytest.mark.parametrize("file", recipes())
def test_a_recipe_of_the_pages_is_valid(file: str) -> None:
    """Seen failing with a misspelt key, an unknown verifier, and a function that its file does not have."""
    config = load_config(file)
    verifier = config.verifier
    settings = [verifier, *verifier.named.values()]
    functions = [verifier.function] if isinstance(verifier.function, str) else list(verifier.function)
    for name in {*functions, *(one.function for one in verifier.named.values())} - {*verifier.named}:
        found(name, "verifier")
    for one in settings:
        if isinstance(one, VerifierSettings) and ":" in str(one.arguments.get("function", "")):
            find_function(one.arguments["function"], kind="reward function")
    workflows = [config.rollout.workflow, *(one.function for one in config.rollout.workflows.values())]
    for name in workflows:
        if name not in config.rollout.workflows:
            found(name, "workflow")


def found(name: str, kind: str) -> None:
    """Import a user's file. A built-in name is only parsed, as its libraries may be missing."""
    location, _ = split_name(name, kind=kind)
    if location.endswith(".py"):
        find_function(name, kind=kind)


def num_prompts(file: str) -> dict[str, int]:
    """Load the training prompts of a recipe as a run would, and count them by source."""
    return {name: len(prompts) for name, prompts in load_sources(load_config(file), TOKENIZER, "train").items()}


def test_the_data_of_the_recipes_is_there() -> None:
    assert num_prompts("my_data.yaml") == {"jsonl": 3}
    assert num_prompts("games.yaml") == {"numbers": 2048, "mazes": 2048}
    assert num_prompts("both.yaml") == {"sums": 8192, "asked_twice": 8192}


@pytest.mark.gym
def test_the_data_of_the_recipes_with_reasoning_gym_is_there() -> None:
    assert num_prompts("gym.yaml") == {"reasoning_gym": 512}
    assert num_prompts("mix.yaml") == {"sums": 8192, "puzzles": 2048, "mine": 3}
    assert num_prompts("mixed.yaml") == {"sums": 8192, "puzzles": 2048}


def shell_lines() -> list[str]:
    text = "\n".join(block.text for page in PAGES for block in blocks(page, "sh")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not SHOWN_ONLY.match(line)]


@pytest.mark.slow
@pytest.mark.parametrize("line", shell_lines())
def test_a_line_of_the_pages_can_be_typed(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Trainings are checked, with a model that is here. Seen failing with an option that does not exist."""
    program, command, *words = shlex.split(line)
    assert program == "areal-lite"
    if command in ("train", "check-config"):
        words.append("model.path=model")
    assert main([command.replace("train", "check-config"), *words]) == 0, capfd.readouterr()


def test_every_built_in_verifier_is_listed() -> None:
    """Seen failing with `exact` taken out of the table."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (ROOT / "docs/verifiers.md").read_text().partition("## Built-in verifiers")[2].partition("\n#")[0]
    listed = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    }
    assert listed == project["entry-points"]["areal_lite.verifiers"].keys()
