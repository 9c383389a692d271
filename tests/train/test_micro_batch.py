"""Packing rows into padded micro-batches: budget, positions, and logits equal to unpadded rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import FAMILIES, VOCABULARY, save_family
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from train_builders import make_config
from transformers import AutoModelForCausalLM

from areal_lite.errors import ConfigError
from areal_lite.train.micro_batch import TokenRows, micro_batch, pack_rows, split_micro_batches
from areal_lite.train.model import _check_packing, completion_outputs, load_model

CPU = torch.device("cpu")
PAIRS = [([5, 6, 7], [8, 9]), ([2], [3, 4, 5, 6]), ([4, 4], [11]), ([9, 8, 7, 6], [5, 4, 3])]


@pytest.fixture(scope="module")
def model(model_folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_folder)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200), st.booleans())
def test_packing_keeps_the_budget_and_every_row(lengths: list[int], max_tokens: int, packed: bool) -> None:
    """Seen failing with the budget compared before the row is counted in, and with packed rows that count as long."""
    groups = pack_rows(lengths, max_tokens=max_tokens, packed=packed)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    tokens = [[lengths[row] for row in group] for group in groups]
    sizes = [sum(group) if packed else len(group) * max(group) for group in tokens]
    assert all(len(group) == 1 or size <= max_tokens for group, size in zip(groups, sizes, strict=True))
    if packed:  # none that the next would have fitted into
        assert all(size + following[0] > max_tokens for size, following in zip(sizes, tokens[1:], strict=False))
    flat = [lengths[row] for group in groups for row in group]
    assert flat == sorted(flat)


@pytest.mark.parametrize(
    ("packed", "input_ids", "predictors"),
    [(False, [[6, 7, 0, 0], [2, 3, 4, 5]], [0, 5, 6]), (True, [[6, 7, 2, 3, 4, 5]], [0, 3, 4])],
)
def test_positions_by_hand(packed: bool, input_ids: list[list[int]], predictors: list[int]) -> None:
    """The example of the module's docstring: a b c d with prompt a b, e f with prompt e; then one behind another.

    Seen failing with predictors one place later, and with packed positions that go on.
    """
    rows = TokenRows([([2, 3], [4, 5]), ([6], [7])])
    ((batch,),) = split_micro_batches(rows, [[1, 0]], max_tokens=8, device=CPU, packed=packed)
    assert batch.input_ids_RS.tolist() == input_ids
    if packed:
        assert batch.position_ids_RS is not None
        assert batch.position_ids_RS.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert batch.predictors_T.tolist() == predictors
    assert batch.tokens_T.tolist() == [2, 0, 1]
    assert rows.output_ids.tolist() == [4, 5, 7]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 12, 1000])
def test_logits_equal_those_of_rows_alone(model: nn.Module, max_tokens: int, packed: bool) -> None:
    """Padding on the right and neighbours change nothing; each completion token is predicted by the one before it.

    Seen failing with padding on the left, with predictors one place later, and with packed rows without positions.
    """
    rows = TokenRows(PAIRS)
    (batches,) = split_micro_batches(rows, [range(len(rows))], max_tokens=max_tokens, device=CPU, packed=packed)
    with torch.no_grad():
        parts = [completion_outputs(model, batch, torch.clone) for batch in batches]
        alone = [
            model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1] for prompt, output in PAIRS
        ]
    places = torch.cat([batch.tokens_T for batch in batches])
    logits = torch.empty(len(rows.output_ids), parts[0].shape[1])
    logits[places] = torch.cat(parts)
    torch.testing.assert_close(logits, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_looks_from_one_packed_row_into_another(family: str, tmp_path: Path) -> None:
    """With the attention that trains it, longer than a sliding window; one that would is refused.

    Seen failing without positions, and OPT without the look at what the row in front changes.
    """
    folder, config = save_family(family, str(tmp_path)), make_config(trainer={"packing": True})
    if family == "OPT":
        with pytest.raises(ConfigError, match="got OPTForCausalLM, whose attention sees the row before"):
            load_model(folder, config)
        return
    model = load_model(folder, config)
    tokens = torch.randint(2, VOCABULARY, (3, 60), generator=torch.Generator().manual_seed(0)).tolist()
    rows = TokenRows((tokens[row][:5], tokens[row][5 : 60 - 15 * row]) for row in range(3))
    with torch.no_grad():
        packed, *alone = (
            completion_outputs(model, micro_batch(rows, chosen, device=CPU, packed=packed), torch.clone)
            for chosen, packed in [(range(3), True), ([0], False), ([1], False), ([2], False)]
        )
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_attention_in_chunks_is_not_packed(model_folder: str) -> None:
    """Its chunks begin by places in the pass, which a short one does not show (Llama 4). Seen failing without."""
    model = load_model(model_folder, make_config(trainer={"packing": True}))
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ConfigError, match="cut by places in the pass"):
        _check_packing(model, CPU, torch.float32)


def test_the_model_is_left_as_it_was(model: nn.Module) -> None:
    """The hooks go, also after an error."""
    tokens = torch.tensor([[2, 3, 4]])
    batch = micro_batch(TokenRows([([2, 3], [4])]), [0], device=CPU)
    nowhere = replace(batch, predictors_T=torch.tensor([99]))
    with pytest.raises(IndexError):
        completion_outputs(model, nowhere, torch.clone)
    assert model(input_ids=tokens).logits.shape[:2] == (1, 3)
