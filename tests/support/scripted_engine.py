"""A deterministic stand-in for a generation engine."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from ledger_builders import version_spans

from areal_lite.data.encode import decoder
from areal_lite.rollout.engine import Interrupt, Sampling
from areal_lite.types import Sample, StopReason


class ScriptedEngine:
    """Stand-in for unit tests: tokens come from the seed alone, one every `token_s` seconds.

    It honours pause, resume and version stamps the way `recompute` does, so that version spans can be
    checked without a model.
    """

    def __init__(self, *, token_s: float = 0.0, eos_id: int = 1, vocab_size: int = 10, tokenizer: Any = None) -> None:
        self.tokens_generated = self.context_tokens = self.cached_tokens = 0
        self.tokenizer = tokenizer
        self.version = 0
        self.calls: list[str] = []
        self._token_s, self._eos_id, self._vocab_size = token_s, eos_id, vocab_size
        self._running = asyncio.Event()
        self._running.set()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        """Draw tokens until the end-of-sequence token or the limit."""
        draw = random.Random(f"{sampling.seed}/{list(prompt_ids)}")
        tokens: list[int] = []
        versions: list[int] = []
        while len(tokens) < sampling.max_new_tokens and (sampling.ignore_end or self._eos_id not in tokens):
            await self._running.wait()
            await asyncio.sleep(self._token_s)
            tokens.append(draw.randrange(1, self._vocab_size))
            versions.append(self.version)
            self.tokens_generated += 1
        is_end = tokens[-1] == self._eos_id and not sampling.ignore_end
        return Sample(
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.full(len(tokens), -np.log(self._vocab_size - 1), dtype=np.float32),
            spans=version_spans(versions),
            stop_reason=StopReason.STOP if is_end else StopReason.LENGTH,
            text=self.text_of(tokens),
        )

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode as a run does; without a tokenizer, the numbers."""
        if self.tokenizer is None:
            return " ".join(map(str, token_ids))
        return decoder(self.tokenizer, "", skip_special_tokens=False)(token_ids)

    async def pause(self, interrupt: Interrupt) -> None:
        """Hold every running sample before its next token."""
        self.calls.append(f"pause({interrupt})")
        self._running.clear()

    async def resume(self) -> None:
        """Let the samples continue."""
        self.calls.append("resume")
        self._running.set()

    async def reset(self) -> None:
        """Note it."""
        self.calls.append("reset")

    async def stamp(self, version: int) -> None:
        """Label tokens from now on."""
        self.calls.append(f"stamp({version})")
        self.version = version

    async def weights_call(self, method: str, argument: dict[str, Any] | None = None) -> None:
        """Note the call."""
        self.calls.append(method)

    def raise_if_dead(self) -> None:
        """Do nothing: it never dies."""

    async def close(self) -> None:
        """Note the call."""
        self.calls.append("close")
