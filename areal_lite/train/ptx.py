"""The language-model term of PPO-ptx: some documents of a text file beside every policy update. Called by the trainer.

Shape letter: `T` tokens of a micro-batch, each document's first one left out: nothing predicts it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from areal_lite.algo.logprobs import token_logprobs
from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError, DataError
from areal_lite.train.micro_batch import MicroBatch, TokenRows, equalise, split_micro_batches
from areal_lite.train.model import completion_logits

__all__ = ["PtxDocuments", "PtxUpdateLoss", "load_documents"]


def load_documents(path: str, *, tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """Read a text file with one document a line; empty lines are passed over.

    Args:
        path: UTF-8 text.
        tokenizer: The policy's; its end-of-sequence token, if it has one, is put behind every document.
        max_tokens: Longer documents are cut to this, which also cuts the end of sequence off.

    Returns:
        Token ids of each document, at least two.

    Raises:
        ConfigError: The file cannot be read.
        DataError: A line cannot be tokenised or gives fewer than two tokens, or there is no document.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"objective.ptx_path must be a UTF-8 text file, got {path}: {error}") from error
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token_ids = tokenizer(line, add_special_tokens=False)["input_ids"]
        except Exception as error:  # the tokenizers library raises its own bare kind
            raise DataError(
                f"line {number} of {path} must be text that the model's tokenizer knows, got {line[:80]!r}: {error}"
            ) from error
        document = [*token_ids, *eos][:max_tokens]
        if len(document) < 2:
            raise DataError(
                f"line {number} of {path} must give at least two tokens, the second of which is predicted, got "
                f"{len(document)} from {line[:80]!r}: remove it"
            )
        documents.append(document)
    if not documents:
        raise DataError(f"objective.ptx_path must hold a document on some line, got only empty lines in {path}")
    return documents


class PtxDocuments:
    """The documents, and which of them an update sees: a function of seed, version and minibatch alone."""

    def __init__(self, config: Config, *, tokenizer_folder: str, rank: int, world_size: int) -> None:
        """Load the documents; every rank holds all of them.

        Raises:
            ConfigError: The file cannot be read.
            DataError: It holds no documents, or one that cannot be tokenised.
        """
        assert config.objective.ptx_path is not None
        self._config, self._rank, self._world_size = config, rank, world_size
        self._device = torch.device(config.run.device)
        self._documents = load_documents(
            config.objective.ptx_path,
            tokenizer=AutoTokenizer.from_pretrained(tokenizer_folder),
            max_tokens=config.model.max_context,
        )

    def update_loss(self, model: nn.Module, *, version: int, minibatch: int) -> "PtxUpdateLoss":
        """Choose the documents of an update and deal them to the ranks; collective.

        Args:
            model: The policy.
            version: Completed trainer steps.
            minibatch: Number of the update in its step.
        """
        chosen = self._choose(version=version, minibatch=minibatch)
        mine = TokenRows((document[:1], document[1:]) for document in chosen[self._rank :: self._world_size])
        parts = split_micro_batches(
            mine, chosen=range(len(mine)), max_tokens=self._config.trainer.micro_batch_tokens, device=self._device
        )
        (parts,) = equalise([parts], device=self._device)
        return PtxUpdateLoss(
            model,
            parts,
            token_ids_T=torch.from_numpy(mine.output_ids).to(self._device),
            num_tokens=sum(len(document) - 1 for document in chosen),
            coef=self._config.objective.ptx_coef,
        )

    def _choose(self, *, version: int, minibatch: int) -> list[list[int]]:
        rng = np.random.default_rng([self._config.run.seed, version, minibatch])
        size, number = self._config.objective.ptx_batch, len(self._documents)
        # A file with fewer documents than a batch gives every one of them, some more often than others.
        order = np.concatenate([rng.permutation(number) for _ in range(-(-size // number))])
        return [self._documents[index] for index in order[:size]]


class PtxUpdateLoss:
    """A function from a micro-batch to its share of `ptx_coef * mean of - log pi(token)`, over all ranks' documents."""

    def __init__(
        self, model: nn.Module, parts: list[MicroBatch], *, token_ids_T: Tensor, num_tokens: int, coef: float
    ) -> None:
        self.parts = parts
        """This rank's micro-batches, as many as on every rank."""
        self._model, self._token_ids_T = model, token_ids_T
        self._num_tokens, self._coef = num_tokens, coef
        self._shares: list[Tensor] = []

    def __call__(self, part: MicroBatch) -> Tensor:
        """Run the model and return the share of the term."""
        logits_TV = completion_logits(self._model, part)
        logprobs_T = token_logprobs(logits_TV, token_ids_T=self._token_ids_T[part.tokens_T], temperature=1.0)
        share = -logprobs_T.sum() / self._num_tokens
        self._shares.append(share.detach())
        return self._coef * share

    def sum(self) -> float:
        """Return this rank's share of the mean, in nats per token and before the coefficient."""
        return float(torch.stack(self._shares).sum())
