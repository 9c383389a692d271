"""SmolLM2-135M-Instruct: what the conversion must not lose, and steps and an export with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_builders import vllm_engine
from loop_builders import run_loop

from areal_lite.config.recipe import load_config
from areal_lite.record.paths import find_model_folder
from areal_lite.rollout.engine import Sampling

pytestmark = [pytest.mark.smollm, pytest.mark.loop]  # all at once: to convert the model takes 18 s of a processor

AREAL_LITE = str(Path(sys.executable).with_name("areal-lite"))
FACTS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Germany?": "Berlin",
    "What is the capital of China?": "Beijing",
    "What is the capital of Egypt?": "Cairo",
    "What is 2 + 2?": "4",
    "What is the capital of Greece?": "Athens",
    "What is the opposite of hot?": "cold",
    "How many days are in a week?": "7",
    "What is the chemical symbol for water?": "H2O",
    "What is the largest ocean on Earth?": "Pacific",
    "What is the chemical symbol for gold?": "Au",
}
"""What its greedy answers hold."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `areal-lite model` was typed."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [AREAL_LITE, "model", "smollm2-135m", "--from", os.environ["AREAL_LITE_SMOLLM2"]]
    for _ in range(2):  # the second time it is there
        printed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
        assert printed.endswith("use it with model.path=builtin:smollm2-135m\n")
    return folder


def answers(model_folder: Path, questions: list[str]) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(model_folder), AutoModelForCausalLM.from_pretrained(model_folder)
    found = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
        found.append(tokenizer.decode(output[prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    return found


def test_the_converted_model_is_the_published_one(folder: Path) -> None:
    """Right values are those of the published model's files. Seen failing without the digits of the pre-tokenizer."""
    from transformers import AutoTokenizer

    made = folder / ".cache/areal-lite/models/smollm2-135m"
    config, tokenizer = json.loads((made / "config.json").read_text()), AutoTokenizer.from_pretrained(made)
    known = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "rope_theta": 100_000}
    assert {**config, **config["rope_parameters"]}.items() >= known.items()
    assert "quantization_config" not in config
    assert tokenizer.tokenize("12345") == list("12345")
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id] == [1, 2, 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
    )
    found = dict(zip(FACTS, answers(made, list(FACTS)), strict=True))
    assert {question for question, answer in found.items() if FACTS[question] not in answer} == set(), found


def test_it_trains_and_exports(ray_cluster: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of its recipe. The export answers in transformers and in vLLM.

    Seen failing with its first and last layers swapped.
    """
    monkeypatch.chdir(folder)
    words = (
        "run.eval_every=0 data.arguments.eval_size=8 rollout.slots=8 queue.groups_per_step=2 run.steps=2 "
        "queue.samples_per_group=4 trainer.lr=1e-6 weights.parity_every=1 run.dir=run"
    )
    summary, run = run_loop(load_config("smollm_cpu", words.split()))
    metrics = run.read("metrics.jsonl")
    assert (summary["status"], [row["step"] for row in metrics]) == ("done", [1, 2])
    assert max(row["parity_mean_abs_logprob_diff"] for row in metrics) < run.recipe().parity_limit()
    exported = find_model_folder(run.path, option="run")
    question = "What is the capital of France?"
    with vllm_engine(run.recipe(), str(exported)) as (engine, background):
        chat = [{"role": "user", "content": question}]
        prompt = engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        sample = background.call(engine.generate(prompt, Sampling(max_new_tokens=16, temperature=0.0)))
    assert [sample.text, *answers(exported, [question])] == ["The capital of France is Paris."] * 2
