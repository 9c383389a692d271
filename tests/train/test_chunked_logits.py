"""Log-probabilities and entropies in chunks of the tokens, against those of the model's own logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from areal_lite.algo.logprobs import token_entropies, token_logprobs
from areal_lite.errors import TrainerError
from areal_lite.train import chunked_logits
from areal_lite.train.chunked_logits import LazyLogits, read_in_chunks
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import completion_outputs

VOCABULARY = 300
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "phi": {},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 16},
    "cohere": {"logit_scale": 0.3, "eos_token_id": 1},
    "granite": {"logits_scaling": 4.0},
}
"""Plain, with a bias, capped, multiplied and divided; large weights, so that it shows."""
TOKENS_T = torch.arange(50) * 11 % VOCABULARY
BATCH = MicroBatch(
    input_ids_RS=torch.arange(60).view(3, 20) * 7 % VOCABULARY,
    predictors_T=torch.arange(5, 55),
    tokens_T=torch.arange(50),
    token_ids_T=TOKENS_T,
    rows=range(3),
)
SLOPES_T2 = torch.linspace(-1, 1, 100).view(50, 2)


def make_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, num_key_value_heads=2, initializer_range=0.2, **sizes, **FAMILIES[family]
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    if family == "phi":
        nn.init.normal_(model.get_output_embeddings().bias)
    return model


def read(logits_TV: Tensor, token_ids_T: Tensor) -> Tensor:
    entropies_T = token_entropies(logits_TV, temperature=0.8, differentiable=True)
    return torch.stack([token_logprobs(logits_TV, token_ids_T, temperature=0.8), entropies_T], dim=1)


def whole(model: nn.Module) -> Tensor:
    """Read the logits of all positions."""
    return read(model(input_ids=BATCH.input_ids_RS).logits.flatten(0, 1)[BATCH.predictors_T], TOKENS_T)


def in_chunks(model: nn.Module) -> Tensor:
    return completion_outputs(model, BATCH, read, TOKENS_T)


def results(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradient of their sum with different weights to each parameter."""
    outputs_T2 = run(model)
    return [outputs_T2.detach(), *torch.autograd.grad((outputs_T2 * SLOPES_T2).sum(), list(model.parameters()))]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_give_what_whole_logits_give(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 7 tokens, of one token, and in one chunk, whatever the model does behind its output layer.

    Seen failing without what comes behind the output layer, without the weights of what came before it (gemma2, cohere,
    granite both), and with the last chunk's gradient of the weights alone.
    """
    model = make_model(family)
    expected = results(model, whole)
    for num_rows in (50, 7, 1):
        monkeypatch.setattr(chunked_logits, "CHUNK_ELEMENTS", num_rows * VOCABULARY)
        for got, value in zip(results(model, in_chunks), expected, strict=True):
            torch.testing.assert_close(got, value, atol=1e-5 * float(value.abs().max()), rtol=1e-5)


def test_gradients_of_chunks_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, 400 chunks of a token err no more than twice what one chunk does, whose sum is rounded once.

    Seen failing (5.3 times) with sums in the dtype of the weights.
    """
    torch.manual_seed(0)
    token_ids_T = torch.arange(400) % VOCABULARY
    start_TH, start_VH = torch.randn(1, 400, 8).bfloat16(), torch.randn(VOCABULARY, 8).bfloat16()
    gradients = []
    for dtype, num_rows in ((torch.float64, 400), (torch.bfloat16, 400), (torch.bfloat16, 1)):
        monkeypatch.setattr(chunked_logits, "CHUNK_ELEMENTS", num_rows * VOCABULARY)
        weight_VH = start_VH.to(dtype).requires_grad_()
        logits = torch.nn.functional.linear(LazyLogits(start_TH.to(dtype), lambda chunk: chunk), weight_VH)
        logprobs_T = read_in_chunks(logits, partial(token_logprobs, temperature=1.0), token_ids_T)
        gradients += torch.autograd.grad(logprobs_T.sum(), weight_VH)
    errors = [float((gradient - gradients[0]).norm()) for gradient in gradients[1:]]
    assert errors[1] < 2 * errors[0], errors


def test_no_matrix_of_all_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that torch makes, forward or backward, has more elements than the output layer's weights.

    Seen failing in one chunk.
    """

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
            return result

    monkeypatch.setattr(chunked_logits, "CHUNK_ELEMENTS", 7 * VOCABULARY)
    model = make_model("gemma2")
    with Largest() as largest:
        results(model, in_chunks)
    assert 50 * VOCABULARY > largest.elements >= 32 * VOCABULARY


def test_a_model_that_overwrites_its_logits_is_refused() -> None:
    """Else what it does would be lost. Seen failing without the check."""
    model = make_model("llama")
    model.get_output_embeddings().register_forward_hook(lambda _layer, _inputs, logits: logits.mul_(2.0))
    with pytest.raises(TrainerError, match="mul_"):
        in_chunks(model)
