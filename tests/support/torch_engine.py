"""A generation engine that decodes in torch, token by token, from weights that were explicitly loaded."""

import asyncio
from collections.abc import Mapping, Sequence

import torch
from scripted_engine import ScriptedEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lite.rollout.engine import Sampling
from areal_lite.types import Float32, Sample


class TorchEngine(ScriptedEngine):
    """What a rollout worker needs, without batching or cache: a sample depends on prompt, seed and weights alone."""

    def __init__(self, model_folder: str) -> None:
        super().__init__(tokenizer=AutoTokenizer.from_pretrained(model_folder))
        self._model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take published weights: the only way by which weights get here."""
        self._model.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()})

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        """Draw from the temperature-scaled distribution with a generator of this sample's own."""
        assert sampling.seed is not None
        generator = torch.Generator().manual_seed(sampling.seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        while len(tokens) < sampling.max_new_tokens and tokens[-1:] != [self.tokenizer.eos_token_id]:
            await asyncio.sleep(0)
            await self._running.wait()
            logprobs_V = self._logprobs_TV([*prompt_ids, *tokens], temperature=sampling.temperature)[-1]
            tokens.append(int(torch.multinomial(logprobs_V.exp(), 1, generator=generator)))
            logprobs.append(float(logprobs_V[tokens[-1]]))
            versions.append(self.version)
            self.tokens_generated += 1
        return self.sample_of(tokens, logprobs, versions, is_end=tokens[-1] == self.tokenizer.eos_token_id)

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Float32:
        """Return [T] log-probabilities at temperature 1."""
        logprobs_TV = self._logprobs_TV([*prompt_ids, *output_ids], temperature=1.0)[len(prompt_ids) - 1 : -1]
        return logprobs_TV.gather(1, torch.tensor(output_ids)[:, None])[:, 0].numpy()

    @torch.no_grad()
    def _logprobs_TV(self, tokens: Sequence[int], *, temperature: float) -> torch.Tensor:
        logits_TV = self._model(torch.tensor([tokens])).logits[0]
        return (logits_TV / temperature).log_softmax(-1)
