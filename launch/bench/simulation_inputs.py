"""Where a simulation's seconds come from: bounds of the hardware times assumed shares, or a finished run's events."""

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_lite.config.recipe import Config
from areal_lite.errors import CheckpointError
from areal_lite.events import Event
from areal_lite.launch.bench.simulation import Inputs
from areal_lite.record.lanes import GAP, PAUSE_PARTS, Stretch, lane_events, reading, sample_lengths
from areal_lite.record.run_folder import RunFolder

ASSUMED = {"memory": 0.6, "prefill": 0.5, "training": 0.35, "link GB/s": 20.0, "verify s": 1.0}
"""Shares of a GPU's peak that decoding (memory), prefill and training (arithmetic) reach; a publication's bandwidth."""

_ROUNDS = 10
"""Of the fit of decoding, which then changes by less than a thousandth."""


def inputs_of_recipe(config: Config, *, gpu: str) -> Inputs:
    """Return the inputs of a recipe on so many GPUs as it names: sizes from the model, speeds assumed.

    Lengths, too, are assumed: log-normal, with a quarter of `rollout.max_new_tokens` as the median.
    """
    from areal_lite.train import memory

    card, architecture, rollout = memory.known_gpu(gpu), memory.architecture_of(config), config.rollout
    size = memory.rank_size(architecture, config)
    parts = memory.engine_parts(architecture, size, config, gib=card["gib"])
    token = memory.kv_bytes_per_token(architecture, config)
    flops = memory.forward_flops(architecture, size, config)
    read, work = card["tb_per_s"] * 1e12 * ASSUMED["memory"], card["tflops"] * 1e12 * rollout.tensor_parallel
    prompt = max(1, config.model.max_context - rollout.max_new_tokens)
    context = prompt + rollout.max_new_tokens / 2
    return Inputs(
        engines=rollout.workers,
        slots=max(1, min(rollout.slots, int(parts["KV cache"] / token / context))),
        decode_s=parts["parameters"] / read,
        decode_sample_s=flops / work / ASSUMED["prefill"],
        decode_context_s=token / read,
        prefill_s=flops / work / ASSUMED["prefill"],
        pause_s=size.num_parameters * memory.itemsize_of(config) / (ASSUMED["link GB/s"] * 1e9),
        verify_s=ASSUMED["verify s"],
        train_token_s=1
        / (memory.trainer_tokens_per_s(architecture, size, config, tflops=card["tflops"]) * ASSUMED["training"]),
        prompt_tokens=prompt,
        median=max(1.0, rollout.max_new_tokens / 4),
        longest=rollout.max_new_tokens,
        gpus=gpus_of(config),
    )


def gpus_of(config: Config) -> int:
    """Return how many GPUs a recipe takes."""
    ranks, engine_gpus = config.trainer.ranks, config.rollout.workers * config.rollout.tensor_parallel
    return max(ranks, engine_gpus) if config.weights.transport == "ipc" else ranks + engine_gpus


def inputs_of_run(folder: Path) -> tuple[Inputs, Config]:
    """Calibrate on a run: its lengths, and what decoding, pauses, verifiers and steps took; also return its recipe.

    Prompts are not in the log: their prefill counts as decoding.

    Raises:
        CheckpointError: The run has fewer than three steps, or no events of its samples.
    """
    run = RunFolder(folder)
    config, events, rows = run.recipe(), run.read("events.jsonl"), run.read("metrics.jsonl")
    if not isinstance(config, Config):
        raise CheckpointError(f"--from needs a run of areal-lite train, got one of offline training in {folder}")
    published = [event["time"] for event in events if event["kind"] == "published"]
    lengths = Counter(sample_lengths(events))
    known = [row for row in rows[1:] if row.keys() >= {"tokens_trained", "tokens_masked_stale"}]
    if len(published) < 3 or not lengths or not known:
        raise CheckpointError(
            f"--from needs a run of at least 3 steps with its events, got {len(published)} publications, "
            f"{lengths.total()} samples and {len(known)} steps with their tokens in {folder}. Fix: name a finished "
            "run's folder"
        )
    stretch = Stretch(reading(events, published[0]), reading(events, published[-1]))
    steps = len(published) - 1
    pause_s = stretch.spent(*PAUSE_PARTS) / steps / len(stretch.workers)
    trainer = stretch.seconds("trainer")
    tokens = statistics.fmean(row["tokens_trained"] + row["tokens_masked_stale"] for row in known)
    decode_s, decode_sample_s = _decoding(events)
    inputs = Inputs(
        engines=config.rollout.workers,
        slots=config.rollout.slots,
        decode_s=decode_s,
        decode_sample_s=decode_sample_s,
        pause_s=pause_s,
        verify_s=_verification(events),
        train_s=max(0.0, (trainer.get("publishing", 0.0) + trainer.get("other", 0.0)) / steps - pause_s),
        train_token_s=trainer.get("training", 0.0) / steps / tokens,
        lengths=dict(sorted(lengths.items())),
        longest=max(lengths),
    )
    return inputs, config


def _verification(events: Sequence[Event]) -> float:
    """Return the mean seconds from a group's last token to its scores, of groups that no resume kept waiting."""
    generated = {event["group"]: event["time"] for event in events if event["kind"] == "group"}
    gaps = [event["time"] for event in events if event["kind"] == GAP]
    spans = [
        (generated[event["group_id"]], event["end"])
        for event in events
        if event["kind"] == "verify" and event["group_id"] in generated
    ]
    waits = [end - start for start, end in spans if not any(start <= gap <= end for gap in gaps)]
    return max(0.0, statistics.fmean(waits)) if waits else 0.0


def _decoding(events: Sequence[Event]) -> tuple[float, float]:
    """Fit the seconds of a decoding step, and those of each running sample, to the samples' lives.

    A sample of T tokens among n took `T * (decode_s + n * decode_sample_s)`, where n is the mean over its tokens: with
    more samples a token takes longer, so the mean over time is larger. It follows from the result, hence the rounds.
    If the samples do not show one of the two (n hardly varies), that is 0.
    """
    lanes = [_Lane(of_lane) for lane, of_lane in lane_events(events).items() if lane.startswith("rollout/")]
    fixed, per_sample = 1.0, 0.0
    for _ in range(_ROUNDS):
        lives = np.concatenate([lane.lives(fixed, per_sample) for lane in lanes])
        seconds, tokens, running = lives[lives[:, 0] > 0].T
        parts = np.stack([tokens, tokens * running], axis=1)
        (fixed, per_sample), *_ = np.linalg.lstsq(parts, seconds, rcond=None)
        if per_sample <= 0:
            return float(seconds.sum() / tokens.sum()), 0.0
        if fixed <= 0:
            return 0.0, float(seconds.sum() / (tokens * running).sum())
    return float(fixed), float(per_sample)


class _Lane:
    """One engine's events as stretches of time with so many running samples, its pauses left out."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._times = np.array([event["time"] for event in events])
        self._seconds, self._running = np.zeros((2, len(events)))
        """Of decoding before each event, and the samples that ran."""
        running, is_paused = 0, False
        for place, event in enumerate(events):
            self._running[place] = running
            if place and not is_paused:
                self._seconds[place] = event["time"] - events[place - 1]["time"]
            if event["kind"] == "running":
                running = event["n"]
            elif event["kind"] in ("pause", "resumed"):
                is_paused = event["kind"] == "pause"
        groups = [event for event in events if event["kind"] == "group"]
        self._ends = np.array([[event["start"], one["end"]] for event in groups for one in event["samples"]])
        self._tokens = np.array([one["tokens"] for event in groups for one in event["samples"]])

    def lives(self, fixed: float, per_sample: float) -> npt.NDArray[np.float64]:
        """Return [samples, 3]: seconds of decoding, tokens, and running samples, a mean over the sample's tokens."""
        steps = self._seconds / (fixed + per_sample * self._running)
        seconds, decoded, slots = (
            np.diff(np.interp(self._ends, self._times, np.cumsum(part))).ravel()
            for part in (self._seconds, steps, steps * self._running)
        )
        return np.stack([seconds, self._tokens, slots / np.maximum(decoded, 1e-9)], axis=1)


def with_split(inputs: Inputs, *, ranks: int, engines: int, of_ranks: int) -> Inputs:
    """Return the inputs with other numbers of ranks and engines: training scales with the ranks, decoding with none.

    Args:
        of_ranks: Those of `inputs`.
    """
    changes: dict[str, Any] = {"engines": engines, "train_token_s": inputs.train_token_s * of_ranks / ranks}
    return inputs.model_copy(update=changes)
