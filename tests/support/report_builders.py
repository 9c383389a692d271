"""Run folders for the tests of the report, small and with known content."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.events import Event

HOSTILE = "</script><img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
"""What a model could write, were it to try."""


def event(time: float, lane: str, kind: str, **ids: Any) -> Event:
    return {"time": time, "lane": lane, "kind": kind, **ids}


def make_events(*, steps: int = 12, workers: int = 2, has_rewards: bool = True) -> list[Event]:
    """One second a step: the trainer waits 0.1, trains 0.7, publishes 0.2; engines pause for the last 0.1 of it.

    A worker's samples last 1.2 seconds from the middle of a second: they go on under the next version. One of three
    scored samples is right at first, two in the second half; two more of four held-out rows are right at the end.

    Args:
        has_rewards: As in a run of this version.
    """
    right = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}
    events = [event(0.0, "controller", "eval", step=0, accuracy=0.25, by_source={"sums": 0.25}, problems=4, failures=0)]
    events[0] |= {"rewards": right} if has_rewards else {}
    for step in range(steps):
        for kind, at in (("wait", 0.0), ("train", 0.1), ("trained", 0.8), ("published", 1.0)):
            events.append(event(step + at, "trainer", kind, version=step + 1))
        for worker in range(workers):
            lane = f"rollout/{worker}"
            if step == 0:
                events += [event(0.0, lane, "stamped", version=0), event(0.0, lane, "resumed")]
            events.append(event(step + 0.5, lane, "running", n=4))
            for kind, at in (("pause", 0.9), ("stamped", 0.95), ("resumed", 1.0)):
                events.append(event(step + at, lane, kind, **({"version": step + 1} if kind == "stamped" else {})))
            spans = [[step, 0, 8], [-1, 8, 10], [step + 1, 10, 20]]
            samples = [{"end": step + 1.7, "tokens": 20, "spans": spans} for _ in range(4)]
            group = f"sums/0/{step}-{worker}#0"
            events.append(event(step + 1.7, lane, "group", group=group, start=step + 0.5, samples=samples))
            times: dict[str, Any] = {"start": step + 1.7, "end": step + 1.7 + 0.01 * (worker + 1)}
            times |= {"rewards": [1.0, float(2 * step >= steps), 0.0, None]} if has_rewards else {}
            events.append(event(times["end"], "verifier/0", "verify", group_id=group, **times))
    events.append(event(steps + 1.0, "controller", "eval", step=steps, accuracy=0.75, by_source={"sums": 0.75}))
    events[-1] |= {"rewards": right | {"b": 1.0, "c": 1.0}, "start": steps + 0.5} if has_rewards else {}
    if has_rewards and steps:
        events.append(event(steps + 0.5, "controller", "checkpoint", step=steps, start=steps + 0.25))
    return events


def make_run(folder: Path, *, steps: int = 12, settings: Mapping[str, Any] | None = None, summary: bool = True) -> Path:
    """A run of `areal-lite train` that went on for some steps."""
    folder.mkdir(parents=True)
    config = Config.model_validate(settings or {"queue": {"max_staleness": 2}})
    (folder / "config.json").write_text(json.dumps(config.model_dump()))
    write_rows(folder / "metrics.jsonl", (_row(step) for step in range(1, steps + 1)))
    write_rows(folder / "events.jsonl", make_events(steps=steps))
    write_rows(folder / "samples.jsonl", (_group(step, number) for step in range(1, steps + 1) for number in range(2)))
    if summary:
        content = {
            "status": "done", "steps": steps, "wall_s": 79.3, "samples_per_s": 0.4, "gen_tokens_per_s": 99.0,
            "trained_tokens_per_s": 60.0, "reward_first": 0.1, "reward_last": 0.6, "loss_first": 0.5, "loss_last": 0.1,
            "rollout_idle_fraction": 0.1, "trainer_idle_fraction": 0.2, "paused_fraction": 0.01,
            "age_max_trained": 2, "max_staleness": 2, "versions": {"torch": "2"},
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(content))
    return folder


def make_offline_run(folder: Path) -> Path:
    """A run of `areal-lite dpo`: no samples, one lane."""
    folder.mkdir(parents=True)
    raw = {"command": "dpo", "data": {"source": "arith", "carelessness": 0.6}}
    (folder / "config.json").write_text(json.dumps(OfflineConfig.model_validate(raw).model_dump()))
    rows = [
        {"step": step, "time_s": 2.0 * step, "loss": 1 / step, "margin": step / 2, "lr": 1e-4, "tokens": 90.0 + step}
        for step in (1, 2, 3, 4)
    ]
    write_rows(folder / "metrics.jsonl", rows)
    figures = {"loss": 0.5, "accuracy": 0.9, "margin": 1.0}
    events = [event(0.0, "controller", "eval", step=0, figures=figures), event(1.0, "trainer", "train", step=1)]
    write_rows(folder / "events.jsonl", events)
    return folder


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(step: int) -> dict[str, Any]:
    math = {"timeouts": 1, "restarts": 0, "failures": {"timeout": 1}, "latency_p50_s": 0.001, "latency_p95_s": 0.01}
    return {
        "step": step, "version": step, "time_s": 10.0 + step, "loss": 1 / step, "lr": 1e-4,
        "entropy": 0.5 + 0.01 * step,
        "kl_ref": None, "grad_norm": float(step), "reward_mean": step / 20, "length_mean": 20.0 + step % 2,
        "truncated_fraction": 0.0, "age_mean": 1.0, "age_max": 2, "age_histogram": {"0": 10, "1": 20, "2": 10},
        "trainer_wait_s": 0.1, "train_s": 0.7, "publish_s": 0.2, "samples_per_s": 8.0 + step % 2,
        "gen_tokens_per_s": 99.0, "rollout_occupancy": 0.5, "reward_by_source": {"sums": step / 20},
        "verifier_failures": {"timeout": 1} if step == 3 else {},
        "verifiers": {"math": {"calls": 8 * step, **math}},
        "ledger": {"waiting": 1, "ready": 2, "trained": 2 * step, "failed": 0},
    }  # fmt: skip


def _group(step: int, number: int) -> dict[str, Any]:
    turns = [{"role": "assistant", "content": HOSTILE}, {"role": "environment", "content": "<"}]
    samples = [
        {"text": HOSTILE, "reward": 1.0, "failure": None, "stop_reason": "stop", "tokens": 20,
         "spans": [[step - 2, 0, 8], [-1, 8, 10], [step - 1, 10, 20]], "messages": turns, "parts": {"found": 1.0},
         "branches": [{"text": HOSTILE, "stop_reason": "length", "tokens": 9, "spans": [[step - 1, 0, 9]]}] * number},
        {"text": "abcdef", "reward": 0.0, "failure": None, "stop_reason": "length", "tokens": 6,
         "spans": [[step - 2, 0, 2], [step - 1, 2, 6]], "feedback": HOSTILE},
        {"text": "", "reward": None, "failure": "timeout", "stop_reason": "stop", "tokens": 1,
         "spans": [[step - 1, 0, 1]]},
    ]  # fmt: skip
    return {"step": step, "group": f"sums/{number}/{step}#0", "prompt": HOSTILE, "answer": "32", "samples": samples}
