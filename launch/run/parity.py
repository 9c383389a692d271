"""Invariant I4, measured: right after a publication, engines and trainer are the same model.

Two questions are asked. Do they give the same sequences the same log-probabilities, within the limits of
`config/recipe.py`? And did every parameter arrive (`weights/families.py`)? The second also finds what moves no
log-probability far enough: a small learning rate, a single layer, a mixture whose routers choose otherwise.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.actors.calls import Calls, call_all
from areal_lite.config.recipe import PARITY_P99, Config
from areal_lite.errors import HandoverError
from areal_lite.types import Group, Prompt
from areal_lite.weights.families import PublishedValues, in_words

logger = logging.getLogger(__name__)

Sequences = Sequence[tuple[list[int], list[int]]]
"""Token ids of prompts and completions."""
_SEQUENCES = 8
"""Compared in one check."""
_COMPARED_AT_FIRST = 3
"""Number of first publications after which parameters are compared; later, as often as log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """|engine - trainer| over all tokens of a check, in nats; the largest float if one is not finite (for JSON)."""

    mean: float
    p99: float
    max: float

    @classmethod
    def between(cls, scored: Sequence[Any], expected: Sequence[Any]) -> "Difference":
        """Compare log-probabilities of the same sequences, [T] nats each."""
        pairs = zip(scored, expected, strict=True)
        nats = np.concatenate([np.abs(np.asarray(left) - np.asarray(right)) for left, right in pairs])
        if not np.isfinite(nats).all():
            return cls(mean=sys.float_info.max, p99=sys.float_info.max, max=sys.float_info.max)
        return cls(mean=float(nats.mean()), p99=float(np.quantile(nats, 0.99)), max=float(nats.max()))


class ParityCheck:
    """Compares the engines of a run with its trainer, and remembers what was published."""

    def __init__(
        self,
        config: Config,
        *,
        model_folder: Path,
        ask: Callable[..., list[Any]],
        report: Callable[[Difference], None],
    ) -> None:
        """Prepare checks.

        Args:
            model_folder: The initial model.
            ask: Calls a method of all trainer ranks.
            report: Takes the largest difference of an engine.
        """
        self._config, self._ask, self._report = config, ask, report
        self._limit = config.parity_limit(is_mixture=_is_mixture(model_folder))
        self._published = PublishedValues()

    def after_publication(self, number: int, *, version: int, handles: Mapping[str, Any], sequences: Sequences) -> None:
        """Compare what is due: log-probabilities, parameters, or both.

        Args:
            number: Number of the publication; 0 at the start of the run.
            version: Published version.
            handles: The engines.
            sequences: To score; log-probabilities are not compared if there are none.

        Raises:
            HandoverError: An engine is not the trainer's model, and `weights.parity_limit` is not 0.
        """
        every = self._config.weights.parity_every
        # The engines loaded the initial weights from files: the first trained weights show whether any arrive.
        is_due = every > 0 and (number <= 1 or version % every == 0)
        differences = self._differences(handles, sequences) if is_due and sequences else {}
        if differences:
            self._report(max(differences.values(), key=attrgetter("mean")))
        is_checked = every > 0 and (is_due or number < _COMPARED_AT_FIRST)
        missed = self._missed(handles) if is_checked else {}
        problems = list(self._problems(differences, missed))
        if not problems:
            return
        text = f"at version {version} the engines must hold the trainer's weights, but {'; and '.join(problems)}"
        if not self._limit:
            logger.warning("%s", text)
            return
        raise HandoverError(
            f"{text}. Fix: see whether vLLM and transformers agree on this model (areal-lite eval of the start, "
            f"docs/models.md), then weights.transport={self._config.weights.transport} and model.compute_dtype; "
            "weights.parity_limit=0 only reports"
        )

    def _differences(self, handles: Mapping[str, Any], sequences: Sequences) -> dict[str, Difference]:
        def expected(*routes: Any) -> Any:
            return self._ask("score", sequences, *routes, waiting_for="the trainer's log-probabilities")[0]

        calls = call_all(handles, "score", sequences)
        by_own_routes = self._config.rollout.replay_routes
        alike = () if by_own_routes else expected()  # while the engines score
        differences = {}
        for engine, answers in self._answers(calls).items():
            logprobs, routes = zip(*answers, strict=True)
            differences[engine] = Difference.between(logprobs, expected(routes) if by_own_routes else alike)
        return differences

    def _missed(self, handles: Mapping[str, Any]) -> dict[str, list[str]]:
        calls = call_all(handles, "parameter_squares")
        (sent, *_) = self._ask("squares", waiting_for="the trainer's fingerprints of its parameters")
        return self._published.missed(sent, self._answers(calls))

    def _answers(self, calls: Calls) -> dict[str, Any]:
        """Return the engines' answers; the health check handles those that fail or are late."""
        failed = calls.failures(self._config.run.stall_timeout_s)
        for name, reason in (failed | dict.fromkeys(calls.pending, "it is late")).items():
            logger.warning("%s did not answer for the parity check: %s", name, reason)
        return calls.values

    def _problems(self, differences: Mapping[str, Difference], missed: Mapping[str, list[str]]) -> Iterator[str]:
        for engine, names in missed.items():
            yield f"{engine} did not get {in_words(names)}"
        for engine, found in differences.items():
            if self._limit and (found.mean > self._limit or found.p99 > PARITY_P99 * self._limit):
                others = in_words(self._published.unequal(engine))
                yield (
                    f"log-probabilities of {engine} are off by {found.mean:.3g} nats on average, {found.p99:.3g} at "
                    f"the 99th percentile (weights.parity_limit={self._limit:g}, {PARITY_P99 * self._limit:g}), with "
                    + (f"other values in {others}" if others else "the same values in all parameters")
                )


def stored_sequences(groups: Iterable[Group], limit: int = _SEQUENCES) -> list[tuple[list[int], list[int]]]:
    """Return token ids of prompt and completion of the first samples."""
    pairs = [
        (sequence.prompt_ids or group.prompt.token_ids, sequence)
        for group in groups
        for sample in group.samples
        for sequence in sample.sequences
    ]
    return [(list(prompt), sequence.token_ids.tolist()) for prompt, sequence in pairs[:limit]]


def prompt_sequences(prompts: Iterable[Prompt], limit: int = _SEQUENCES) -> list[tuple[list[int], list[int]]]:
    """Return sequences to score before there are samples: prompts, with all but the first token as completion."""
    long_enough = (list(prompt.token_ids) for prompt in prompts if len(prompt.token_ids) > 1)
    return [(token_ids[:1], token_ids[1:]) for token_ids in islice(long_enough, limit)]


def _is_mixture(folder: Path) -> bool:
    """Whether a model has experts; transformers has several names for their number."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    settings = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    return any(settings.get(name) for name in names)
