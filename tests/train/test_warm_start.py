"""What the built-in model is shown: of every source that has something to show, turn by turn; and its cache."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from episode_builders import Speaker, play
from rich.console import Console
from safetensors import SafetensorError
from source_builders import ROWS, recipe, source_of, write_parquet
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from areal_lite.config.data import ArithConfig
from areal_lite.config.offline import load_any_config
from areal_lite.config.recipe import Config, load_config, parse_config
from areal_lite.data.arith import CHARACTERS, worked_solutions
from areal_lite.data.demonstrations import PRINTABLE, alphabet, demonstrations, turn_examples, turns_of
from areal_lite.data.tasks import Task
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import ConfigError, DataError
from areal_lite.launch.run.train import prepare_model
from areal_lite.rollout.runner import Workflows
from areal_lite.rollout.workflows import multi_turn
from areal_lite.train import warm_start
from areal_lite.train.warm_start import ensure_warm_start

GUESS = {"source": "guess_number", "workflow": "guess_number", "arguments": {"train_size": 50, "eval_size": 4}}
SMALL = {"warm_start": {"steps": 1, "batch_size": 4, "hidden_size": 32, "num_layers": 1}}


def episode(*turns: tuple[bool, str]) -> Task:
    roles = {True: "assistant", False: "environment"}
    shown = [{"role": roles[is_own], "content": text} for is_own, text in turns]
    return Task(origin="here", prompt="1-9?", answer="", demonstration=shown)


def test_chained_sums_alone_give_the_model_they_always_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written down before other sources had demonstrations: caches and published figures stay valid.

    Seen failing with the alphabet of all printable characters for every recipe.
    """
    monkeypatch.setattr(warm_start, "_learn", lambda *arguments, **keywords: None)
    demo, sft = load_config("arith_cpu"), load_any_config("rlhf_sft", command="sft")
    assert ensure_warm_start(demo, cache_dir=tmp_path).name == "46da1eb1a9b95f7f"
    assert ensure_warm_start(sft, cache_dir=tmp_path).name == "3d01ad1396bd80ea"


def test_the_alphabet_grows_with_the_sources() -> None:
    assert set(CHARACTERS) < set(PRINTABLE)
    assert len(PRINTABLE) == 96
    assert alphabet(recipe()) == CHARACTERS
    assert alphabet(recipe(data={"template": "{prompt}##"})) == CHARACTERS
    assert alphabet(recipe(data={"template": "Q: {prompt}"})) == PRINTABLE
    assert alphabet(recipe(data={"mix": {"a": {}, "b": {}}})) == CHARACTERS
    assert alphabet(recipe(data={"mix": {"a": {}, "b": GUESS}})) == PRINTABLE


def test_sources_are_shown_in_the_shares_of_training() -> None:
    """Weights 3 and 1 of 40: 30 sums, with the settings of their own source, and 10 games. Seen failing with equal
    shares, and with `data.arith` in place of the mixed source's.
    """
    arith = {"max_terms": 2, "train_size": 10, "eval_size": 2}
    config = recipe(data={"mix": {"sums": {"weight": 3, "arith": arith}, "game": GUESS}})
    shown = demonstrations(config, count=40)
    problems = worked_solutions(ArithConfig(**arith), 30, seed=0, carelessness=0.6)
    assert [(item.prompt, item.demonstration) for item in shown[:30]] == [
        (problem.prompt, problem.demonstration) for problem in problems
    ]
    assert all(item.origin.startswith("guess_number train") and len(turns_of(item)) % 2 for item in shown[30:])
    assert len(shown) == 40


def test_a_short_source_is_shown_again_and_again() -> None:
    shown = demonstrations(recipe(data=GUESS), count=120)
    assert len(shown) == 120
    assert shown[:50] == shown[50:100]


def test_prompts_are_shown_inside_their_template() -> None:
    """As in training. Seen failing with the bare prompt."""
    shown = demonstrations(recipe(data={"template": "Q: {prompt}"}), count=5)
    assert all(item.prompt.startswith("Q: ") for item in shown)
    game = demonstrations(recipe(data={**GUESS, "template": "{prompt} "}), count=1)[0]
    assert game.prompt.endswith("? ")


def test_each_own_turn_is_learned_behind_all_that_came_before() -> None:
    """`1-9?` 5 EOS < 2 EOS: two examples; the environment's `<` is context of the second, never learned.

    As in an episode of a model without chat template: it is played, and the second turn has the same context. Seen
    failing with the environment's text in the completion, and with no end of sequence in the context.
    """
    tokenizer = build_char_tokenizer(PRINTABLE)
    first, second = turn_examples([episode((True, "5"), (False, "<"), (True, "2"), (False, "="))], tokenizer)
    prompt, five, smaller, two = (tokenizer(text)["input_ids"] for text in ("1-9?", "5", "<", "2"))
    end = tokenizer.eos_token_id
    assert first == (prompt, ([*five, end],), None)
    assert second == ([*prompt, *five, end, *smaller], ([*two, end],), None)

    async def step(messages: Any, row: Any) -> tuple[str, bool]:
        return "<", False

    engine = Speaker(["5", "2"])
    play(engine, Workflows(default="own", loaded={"own": (multi_turn, {"step": step, "max_turns": 2})}))
    assert second.prompt == engine.contexts[1]


def test_a_character_outside_the_alphabet_is_named() -> None:
    with pytest.raises(DataError, match=r"here: .* the character 'é' \(U\+00E9\)"):
        turn_examples([episode((True, "é"))], build_char_tokenizer(PRINTABLE))


def test_without_demonstrations_there_is_no_warm_start(tmp_path: Path) -> None:
    """Files bring none, and take no share; random weights need none.

    Seen failing with chained sums shown to every recipe, and with a share kept for the file.
    """
    data = source_of(write_parquet(tmp_path / "rows.parquet", ROWS))
    with pytest.raises(ConfigError, match=r"sources bring none: set model\.path .* model\.warm_start\.steps=0"):
        ensure_warm_start(recipe(data=data, model=SMALL), cache_dir=tmp_path / "cache")
    untrained = {"warm_start": {**SMALL["warm_start"], "steps": 0}}
    folder = ensure_warm_start(recipe(data=data, model=untrained), cache_dir=tmp_path / "cache")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("A b\n")["input_ids"]) == "A b\n"
    mixed = recipe(data={"mix": {"file": data, "game": GUESS}}, model=SMALL)
    origins = [item.origin for item in demonstrations(mixed, count=10)]
    assert len(origins) == 10
    assert all(origin.startswith("guess_number") for origin in origins)


def test_a_log_shows_how_far_the_warm_start_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of silence were seen where there is no terminal for a bar."""
    monkeypatch.chdir(tmp_path)
    config = recipe(data=GUESS, model={"warm_start": SMALL["warm_start"] | {"steps": 8}})
    prepare_model(config, console=Console(file=(log := io.StringIO())))
    assert re.findall(r"(\d) of 8 steps, loss", log.getvalue()) == ["2", "4", "6", "8"]


def test_a_folder_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be made, and a disk that is full, in safetensors' words. Seen failing with either's own.

    What was written of it is gone.
    """
    (tmp_path / "file").touch()
    config = recipe(data=GUESS, model=SMALL)
    words = r"the folder for the built-in model, .* must be writable, got "
    with pytest.raises(ConfigError, match=rf"{words}.*/file/cache: Not a directory. Fix: choose another"):
        ensure_warm_start(config, cache_dir=tmp_path / "file" / "cache")

    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(Qwen3ForCausalLM, "save_pretrained", full)
    with pytest.raises(ConfigError, match=rf"{words}.*/cache: Error .* No space left on device"):
        ensure_warm_start(config, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.fixture
def tiny_config(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Build recipes of a model that learns two steps of 32 examples."""

    def make(**warm: Any) -> Config:
        settings = {"steps": 2, "batch_size": 4, "hidden_size": 32, "num_layers": 1, **warm}
        return parse_config({"model": {"warm_start": settings}, "data": {"arith": {"eval_size": 8, "train_size": 8}}})

    monkeypatch.setattr(warm_start, "_NUM_EXAMPLES", 32)
    return make


def test_warm_start_makes_a_model_folder(tmp_path: Path, tiny_config: Callable[..., Config]) -> None:
    steps: list[tuple[int, int]] = []
    config = tiny_config()
    folder = ensure_warm_start(
        config, cache_dir=tmp_path / "cache", progress=lambda done, of, loss: steps.append((done, of))
    )
    assert steps == [(1, 2), (2, 2)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings == config.model.max_context
    assert tokenizer.decode(tokenizer.encode("7+25=?")) == "7+25=?"


def test_warm_start_is_cached_by_content(
    tmp_path: Path, tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same settings train once; another task, carelessness or context gets a folder of its own.

    Runs with different seeds start from the same model, and ask for it without disturbing the random state. Seen
    failing with the carelessness, and with the context length, left out of the hash.
    """
    folder = ensure_warm_start(tiny_config(), cache_dir=tmp_path)
    before = folder.stat().st_mtime_ns
    calls: list[int] = []
    for seed in (0, 5):
        config = parse_config({**tiny_config().model_dump(), "run": {"seed": seed}})
        assert ensure_warm_start(config, cache_dir=tmp_path, progress=lambda *call: calls.append(1)) == folder
    assert calls == []
    assert folder.stat().st_mtime_ns == before
    random = torch.get_rng_state()
    careless = ensure_warm_start(tiny_config(carelessness=0.25), cache_dir=tmp_path)
    assert torch.equal(torch.get_rng_state(), random)
    monkeypatch.setattr(warm_start, "_learn", lambda *arguments, **keywords: None)
    base = tiny_config().model_dump()
    base["model"]["max_context"] = 256
    terms = tiny_config().model_dump()
    terms["data"]["arith"]["max_terms"] = 3
    others = [tiny_config(lr=1e-4), parse_config(base), parse_config(terms)]
    assert len({ensure_warm_start(other, cache_dir=tmp_path) for other in others} | {folder, careless}) == 5


def test_an_interrupted_warm_start_leaves_nothing(tmp_path: Path, tiny_config: Callable[..., Config]) -> None:
    """Seen failing with the model written into its final folder directly."""

    def interrupt(done: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_warm_start(tiny_config(), cache_dir=tmp_path, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    folder = ensure_warm_start(tiny_config(), cache_dir=tmp_path)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.parametrize(("busy_percent", "threads"), [(0.0, 4), (30.0, 3), (100.0, 1)])
def test_a_warm_start_takes_the_cores_that_are_idle(
    busy_percent: float,
    threads: int,
    tmp_path: Path,
    tiny_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside others, threads wait for each other. Seen failing with as many threads as cores, whatever they do."""
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: busy_percent)
    before, seen = torch.get_num_threads(), set[int]()
    torch.set_num_threads(4)
    try:
        ensure_warm_start(
            tiny_config(), cache_dir=tmp_path, progress=lambda done, of, loss: seen.add(torch.get_num_threads())
        )
        assert seen == {threads}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_faster_process_wins(tmp_path: Path, tiny_config: Callable[..., Config]) -> None:
    """When the folder appears while this process still trains, it is used, and nothing is left over."""
    finished = ensure_warm_start(tiny_config(), cache_dir=tmp_path / "other")

    def overtake(done: int, steps: int, loss: float) -> None:
        if done == steps:
            (tmp_path / "cache" / finished.name).mkdir()
            (tmp_path / "cache" / finished.name / "config.json").write_text("{}")

    folder = ensure_warm_start(tiny_config(), cache_dir=tmp_path / "cache", progress=overtake)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [finished.name]
    assert (folder / "config.json").read_text() == "{}"
