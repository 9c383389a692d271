"""Packing rows into padded micro-batches: budget, positions, and logits equal to unpadded rows."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from train_builders import save_tiny_model
from transformers import AutoModelForCausalLM

from areal_lite.train.micro_batch import MicroBatch, TokenRows, equalise, pack_rows, split_micro_batches
from areal_lite.train.model import completion_outputs

CPU = torch.device("cpu")
PAIRS = [([5, 6, 7], [8, 9]), ([2], [3, 4, 5, 6]), ([4, 4], [11]), ([9, 8, 7, 6], [5, 4, 3])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nn.Module]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_packing_keeps_the_budget_and_every_row(lengths: list[int], max_tokens: int) -> None:
    """Seen failing with the budget compared before the row is counted in."""
    groups = pack_rows(lengths, max_tokens=max_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[row] for row in group) <= max_tokens
    flat = [lengths[row] for group in groups for row in group]
    assert flat == sorted(flat)


def test_positions_by_hand() -> None:
    """The example of the module's docstring: a b c d with prompt a b, e f with prompt e.

    Seen failing with predictors one place later.
    """
    rows = TokenRows([([2, 3], [4, 5]), ([6], [7])])
    ((batch,),) = split_micro_batches(rows, [[1, 0]], max_tokens=8, device=CPU)
    assert batch.input_ids_RS.tolist() == [[6, 7, 0, 0], [2, 3, 4, 5]]
    assert batch.predictors_T.tolist() == [0, 5, 6]
    assert batch.tokens_T.tolist() == [2, 0, 1]
    assert rows.output_ids.tolist() == [4, 5, 7]


def test_values_are_spread_and_split_by_row() -> None:
    rows = TokenRows(PAIRS)
    spread = rows.spread(np.array([1.0, 2.0, 3.0, 4.0], np.float32))
    assert spread.tolist() == [1, 1, 2, 2, 2, 2, 3, 4, 4, 4]
    assert [part.tolist() for part in rows.split(spread)] == [[1, 1], [2, 2, 2, 2], [3], [4, 4, 4]]
    assert TokenRows([]).split(np.empty(0, np.float32)) == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        TokenRows([([], [3])])


@pytest.mark.parametrize("max_tokens", [1, 12, 1000])
def test_logits_equal_those_of_rows_alone(model: nn.Module, max_tokens: int) -> None:
    """Padding on the right and neighbours change nothing; each completion token is predicted by the one before it.

    Seen failing with padding on the left, and with predictors one place later.
    """
    rows = TokenRows(PAIRS)
    (batches,) = split_micro_batches(rows, [range(len(rows))], max_tokens=max_tokens, device=CPU)
    with torch.no_grad():
        parts = [completion_outputs(model, batch, torch.clone) for batch in batches]
        alone = [
            model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1] for prompt, output in PAIRS
        ]
    places = torch.cat([batch.tokens_T for batch in batches])
    logits = torch.empty(len(rows.output_ids), parts[0].shape[1])
    logits[places] = torch.cat(parts)
    torch.testing.assert_close(logits, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_the_model_is_left_as_it_was(model: nn.Module) -> None:
    """The hooks go, also after an error."""
    tokens = torch.tensor([[2, 3, 4]])
    nowhere = MicroBatch(input_ids_RS=tokens, predictors_T=torch.tensor([99]), tokens_T=torch.tensor([0]))
    with pytest.raises(IndexError):
        completion_outputs(model, nowhere, torch.clone)
    assert model(input_ids=tokens).logits.shape[:2] == (1, 3)


def test_an_empty_micro_batch_trains_nothing_but_runs(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with fewer micro-batches gets empty ones, whose backward pass gives every parameter a zero gradient."""
    monkeypatch.setattr("areal_lite.train.micro_batch.max_over_ranks", lambda counts: counts.new_tensor([2, 1]))
    updates = equalise([[], []], device=CPU)
    assert [len(update) for update in updates] == [2, 1]
    completion_outputs(model, updates[0][0], torch.clone).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
