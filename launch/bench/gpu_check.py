"""`areal-lite bench gpu-check`: the first hour on GPUs, as short runs with one part more than the one before.

Every run is synchronous with fixed seeds, so that what differs between two of them is the part that was added: the
first step's samples, loss and gradient must be the same. With `--cpu` the same runs go over gloo on this machine.
"""

import json
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from areal_lite.config.reading import parse_override, read_yaml
from areal_lite.config.section import Section
from areal_lite.errors import ConfigError
from areal_lite.launch.bench import view
from areal_lite.launch.bench.harness import PlannedRun, run_to_the_end, say, write_results
from areal_lite.launch.bench.plan import choose, planned_config
from areal_lite.node import package_versions
from areal_lite.record.columns import Row, markdown
from areal_lite.record.run_folder import read_summary, write_whole

_SPEED_MODEL, _SPEED_PARAMETERS = "Qwen/Qwen3-1.7B", 1.72e9
_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats between engine and rank, where float32 is wider than on a CPU, whose attention kernels agree to 1e-5; and the
relative difference of the first step's gradient norm from that of the run before."""


class Part(Section):
    """One run: what it adds, and what it needs."""

    shows: str
    gpus: int
    settings: dict[str, Any] = Field({})
    like: str | None = None
    """the run whose first step it must repeat"""
    on_cpu: bool = True


_CHECK = read_yaml(Path(__file__).with_name("gpu-check.yaml"), holding="recipe, settings, devices and parts")
PARTS = {name: Part.model_validate(part) for name, part in _CHECK["parts"].items()}


def any_reward(prompt: str, completion: str, answer: str, **row: Any) -> float:
    """Return a number between 0 and 1 that is the completion's own: gradients need no model that knows anything."""
    return zlib.crc32(completion.encode()) % 101 / 100


def bench(overrides: Sequence[str], *, cpu: bool, only: Sequence[str], out: Path) -> int:
    """Run what the machine has GPUs for, and say what passed; 1 where something did not."""
    out = out.resolve()
    device, num_gpus = ("cpu", 0) if cpu else ("cuda", torch.cuda.device_count())
    if not cpu and not num_gpus:
        raise ConfigError(
            "gpu-check needs a GPU that PyTorch sees, got none: see areal-lite doctor, or rehearse: --cpu"
        )
    chosen = choose([*PARTS, "dead-engine"], only, what="part")
    reasons = {name: _why_not(PARTS[name], cpu=cpu, num_gpus=num_gpus) for name in chosen if name in PARTS}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in left_out.items():
        say(f"{name} is left out: {reason}")
    extra = dict(map(parse_override, overrides))
    runs = [_planned(name, device, extra, out=out) for name in reasons if name not in left_out]
    rows: list[Row] = []

    def collect() -> dict[str, Any]:
        rows[:] = judged([(run.name, out / run.name) for run in runs])
        content = {"benchmark": "gpu-check", "versions": package_versions(), "device": device, "left_out": left_out}
        content = write_results({**content, **_gpus(), "overrides": list(overrides), "rows": rows}, out=out)
        write_whole(out / "gpu-check.md", _page(content))
        return content

    def show(_content: object) -> None:
        view.show(view.table("gpu-check", rows, title="gpu-check"))
        for row in rows:
            if row["outcome"] != "passed":
                say(f"{row['name']}: {row['outcome']}")
        say(f"to send us: {out / 'gpu-check.md'} and results.json beside it")

    code = run_to_the_end([runs], out=out, collect=collect, show=show)
    if code == 0 and "dead-engine" in chosen:
        say("dead-engine: an engine is killed in a run, which must go on")
        settings = [f"{key}={value}" for key, value in {**_CHECK["devices"][device], **extra}.items()]
        words = ["drill", _CHECK["recipe"], *settings, "--faults", "engine", "--out", str(out / "dead-engine")]
        code = subprocess.run([sys.argv[0], *words], check=False).returncode
    return code or int(any(row["outcome"] != "passed" for row in rows))


def judged(folders: Iterable[tuple[str, Path]]) -> list[dict[str, Any]]:
    """Read finished runs, and say of each whether it passed, or what was expected and what came."""
    rows: dict[str, dict[str, Any]] = {}
    for name, folder in folders:
        part, found = PARTS[name], read_summary(folder)
        row = {"name": name, **part.model_dump(), "outcome": "failed: it has not ended; its log says why"}
        rows[name] = row
        if found.get("status") != "done":
            continue
        # With figures that are no number, which must not pass.
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        parities = [one["parity_max_abs_logprob_diff"] for one in steps]
        row |= {
            "parity": max(value for value in parities if value is not None),
            "loss": steps[0]["loss"],
            "grad_norm": steps[0]["grad_norm"],
            "step_s": (steps[-1]["time_s"] - steps[0]["time_s"]) / len(steps[1:]),
            "trained_per_s": sum(one["tokens_trained"] for one in steps[1:]) / sum(one["train_s"] for one in steps[1:]),
            "gen_tokens_per_s": steps[-1]["gen_tokens_per_s"],
        }
        row["outcome"] = _verdict(row, rows.get(part.like or ""), part)
    return list(rows.values())


def _verdict(row: Mapping[str, Any], other: Mapping[str, Any] | None, part: Part) -> str:
    limit = _LIMITS[part.settings.get("model.compute_dtype", "float32")]
    if not row["parity"] <= limit:
        return f"failed: engine and rank must agree within {limit:g} nats, got {row['parity']:.2g}"
    if other and "grad_norm" in other:
        difference = abs(row["grad_norm"] / other["grad_norm"] - 1)
        if not difference <= limit:
            return (
                f"failed: the first step's gradient norm must be that of {other['name']}, {other['grad_norm']:.6g}, "
                f"got {row['grad_norm']:.6g}"
            )
    return "passed"


def _why_not(part: Part, *, cpu: bool, num_gpus: int) -> str | None:
    if cpu:
        return None if part.on_cpu else "it needs a GPU"
    return None if num_gpus >= part.gpus else f"it needs {part.gpus} GPUs, there are {num_gpus}"


def _planned(name: str, device: str, extra: dict[str, Any], *, out: Path) -> PlannedRun:
    more: dict[str, Any] = {"model.path": str(_random_model(out / "model"))} if name == "speed" else {}
    changes = [_CHECK["settings"], _CHECK["devices"][device], PARTS[name].settings, more, extra]
    return PlannedRun(name=name, config=planned_config(_CHECK["recipe"], name, changes))


def _random_model(folder: Path) -> Path:
    """Write a model of a known shape with random weights, whose completions hardly ever end by themselves."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from areal_lite.data.tokenizer import build_char_tokenizer
    from areal_lite.train.memory import KNOWN

    if not (folder / "config.json").is_file():
        tokenizer = build_char_tokenizer("0123456789+-*=?; \n")
        shape = {"max_position_embeddings": 4096, "eos_token_id": tokenizer.eos_token_id}
        config = AutoConfig.for_model(**KNOWN["models"][_SPEED_MODEL], **shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def _gpus() -> dict[str, Any]:
    cuda = torch.cuda
    names = [cuda.get_device_name(index) for index in range(cuda.device_count())] if cuda.is_available() else []
    left = [round(free / total, 3) for free, total in (cuda.mem_get_info(index) for index in range(len(names)))]
    return {"gpus": names, "memory_free_at_the_end": left}


def _page(content: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    head = f"# gpu-check on {', '.join(content['gpus']) or content['processor']}"
    commit = f"areal-lite {content['commit']}; {versions}"
    return "\n\n".join([head, commit, markdown("gpu-check", content["rows"]), *_notes(content)]) + "\n"


def _notes(content: Mapping[str, Any]) -> Iterator[str]:
    from areal_lite.train.memory import KNOWN

    yield from (f"- **{row['name']}**: {row['outcome']}" for row in content["rows"] if row["outcome"] != "passed")
    yield from (f"- {name} was left out: {why}" for name, why in content["left_out"].items())
    card = next((name for name in KNOWN["gpus"] if any(name in gpu for gpu in content["gpus"])), None)
    for row in content["rows"]:
        if "trained_per_s" in row:
            rate, generated = row["trained_per_s"], row["gen_tokens_per_s"]
            yield f"- {row['name']}: {rate:,.0f} tokens/s trained, {generated:,.0f} generated"
            if row["name"] == "speed" and card:
                share = 6 * _SPEED_PARAMETERS * rate / (KNOWN["gpus"][card]["tflops"] * 1e12)
                yield f"- speed: {share:.1%} of the peak of {card} (MFU: 6 operations a parameter and token)"
    if content["memory_free_at_the_end"]:
        yield "GPU memory free at the end: " + ", ".join(f"{share:.0%}" for share in content["memory_free_at_the_end"])
