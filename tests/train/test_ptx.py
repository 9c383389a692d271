"""PPO-ptx: documents beside the reward."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preset_builders import assert_same, config_of, make_trainer
from torch import nn
from train_builders import make_rows, make_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError, DataError
from areal_lite.train.ptx import choose_documents, load_documents
from areal_lite.types import Row


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return make_rows(old_tokens=2)


def ptx_config(folder: Path, text: str, **knobs: Any) -> Config:
    (folder / "text.txt").write_text(text)
    knobs = {"ptx_coef": 0.5, "ptx_path": str(folder / "text.txt"), "ptx_batch": 2, **knobs}
    return config_of({"objective": knobs})


def test_documents_are_learned_beside_the_reward(model_folder: str, tmp_path: Path, rows: list[Row]) -> None:
    """With rewards that teach nothing, the update is the gradient of the documents' mean cross-entropy alone."""
    trainer = make_trainer(model_folder, ptx_config(tmp_path, "0123\n\n987\n", ptx_batch=2))
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(2):
        total = torch.zeros(())
        for tokens in ([2, 3, 4, 5, 1], [11, 10, 9, 1]):
            logits = plain(input_ids=torch.tensor([tokens])).logits[0, :-1]
            total = total + nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum")
        optimizer.zero_grad()
        (0.5 * total / 7).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach()) / 7)
    stats = trainer.train_step(make_shard(rows, rewards=np.ones((3, 4))))
    assert stats["ptx_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert stats["loss"] == 0.0
    assert_same(trainer.model, plain)


def test_documents_follow_from_seed_version_and_update(model_folder: str, tmp_path: Path) -> None:
    """The same again after a resume; others in the next update, in the next step, and under another seed.

    Seen failing with the update's number left out of the seed.
    """
    text = "\n".join(str(number) for number in range(100, 140))
    config = ptx_config(tmp_path, text, ptx_batch=4)

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    documents = load_documents(str(config.objective.ptx_path), tokenizer=tokenizer, max_tokens=64)

    def chosen(config: Config, version: int, minibatch: int) -> list[list[int]]:
        return choose_documents(documents, config=config, version=version, minibatch=minibatch)

    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})})
    assert chosen(config, 3, 1) == chosen(config, 3, 1)
    others = [chosen(config, 3, 0), chosen(config, 4, 1), chosen(other, 3, 1)]
    assert all(batch != chosen(config, 3, 1) for batch in others)
    assert len({tuple(document) for document in chosen(config, 3, 1)}) == 4


def test_every_document_has_its_turn_in_a_short_file(tmp_path: Path) -> None:
    config = ptx_config(tmp_path, "", ptx_batch=7)
    chosen = choose_documents([[2, 1], [3, 1], [4, 1]], config=config, version=0, minibatch=0)
    counts = Counter(map(tuple, chosen))
    assert sorted(counts.values()) == [2, 2, 3]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (None, ConfigError, "ptx_path must be a UTF-8 text file, got .*No such file"),
        ("\n  \n", DataError, "must hold a document on some line"),
        ("01\n2x3\n", DataError, "line 2 of .*: .* cannot encode the character 'x' "),
    ],
)
def test_documents_that_cannot_be_used(
    model_folder: str, tmp_path: Path, text: str | None, kind: type[Exception], message: str
) -> None:
    path = tmp_path / "text.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(kind, match=message):
        load_documents(str(path), tokenizer=AutoTokenizer.from_pretrained(model_folder), max_tokens=8)


def test_long_documents_are_cut(model_folder: str, tmp_path: Path) -> None:
    """At the context the model takes; a document that fits keeps its end of sequence."""
    path = tmp_path / "text.txt"
    path.write_text("0123456789\n01\n")
    documents = load_documents(str(path), tokenizer=AutoTokenizer.from_pretrained(model_folder), max_tokens=4)
    assert documents == [[2, 3, 4, 5], [2, 3, 1]]


def test_a_model_without_end_of_sequence_has_documents_too(model_folder: str, tmp_path: Path) -> None:
    """A line of one token then teaches nothing, and is named. Seen failing with None among the token ids."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.eos_token = None
    path = tmp_path / "text.txt"
    path.write_text("01\n")
    assert load_documents(str(path), tokenizer=tokenizer, max_tokens=4) == [[2, 3]]
    path.write_text("01\n2\n")
    with pytest.raises(DataError, match=r"line 2 of .* must give at least two tokens.*got 1 from '2'"):
        load_documents(str(path), tokenizer=tokenizer, max_tokens=4)
