"""The arithmetic task in TRL's `GRPOTrainer`: its packages, its process, and what the process does.

    python benchmarks/peers_trl.py SETTINGS.json    trains; writes `steps.jsonl` beside the settings
    python benchmarks/peers_trl.py                  only imports TRL: whether its packages are whole

TRL and accelerate alone, pinned, are installed into a folder of their own when they are first needed. That folder is
on the path of TRL's process and of no other; everything else (torch, transformers, datasets, numpy) is what this
project runs with. So both sides compute with the same builds, TRL changes nothing here, and 2 MB are downloaded in
place of 1 GB.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lite.errors import ConfigError, StallError, TrainerError
from areal_lite.record.run_folder import RunFolder
from areal_lite.verify.builtin.text import last_number, regex

PINS = {"trl": "1.16.0", "accelerate": "1.15.0"}
"""TRL's trainer changes its defaults between minor versions; accelerate is the one that was tried with it."""
COMMAND = (sys.executable, __file__)
_INSTALL_S = 600.0
_SILENCE_S = 900.0
"""Seconds without a line after which TRL's process is ended; a step takes one, of a large model minutes."""
_SHOWN_LINES, _POLL_S = 8, 0.2


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What one run shows."""

    seconds: tuple[float, ...]
    """After each step, the one of step 1 first; evaluations and start-up are left out."""
    accuracies: Mapping[int, float]
    """By steps done, from 0 on; empty in a run of the search."""
    tokens: tuple[float, ...]
    """Mean completion tokens of a sample, by step."""


def ensure_trl(cache: Path, *, say: Callable[[str], None]) -> Path:
    """Return the folder of TRL's packages, which is below `cache`; made, whole or not at all, where it is missing.

    Raises:
        ConfigError: It cannot be made; the message has the end of what went wrong.
    """
    folder = cache / "_".join(["packages", *(f"{name}-{pin}" for name, pin in PINS.items())])
    if folder.is_dir():
        return folder
    say(f"installing TRL {PINS['trl']} into {folder} (once; under a minute on a good network) ...")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        packages, pins = Path(made) / "packages", [f"{name}=={pin}" for name, pin in PINS.items()]
        # Without dependencies: the project's packages serve, and pip must not bring a second torch.
        options = ["--target", str(packages), "--no-deps", "--no-input", "--disable-pip-version-check", "--quiet"]
        _run([sys.executable, "-m", "pip", "install", *options, *pins], doing=f"install {' and '.join(pins)}")
        _run(list(COMMAND), doing="import TRL", packages=packages)
        packages.rename(folder)
    return folder


def _run(command: list[str], *, doing: str, packages: Path | None = None) -> None:
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = _environment(packages) if packages else None
    try:
        subprocess.run(command, env=environment, timeout=_INSTALL_S, check=True, **streams)
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "output", None) or error).splitlines()
        # pip names every local index folder that lacks a package: noise that would hide the cause.
        end = "\n".join([line for line in lines if "is ignored: it is neither" not in line][-_SHOWN_LINES:])
        raise ConfigError(
            f"TRL's side failed to {doing}:\n{end}\nFix: look at network, disk and pip's index, and run this again"
        ) from error


def _environment(packages: Path) -> dict[str, str]:
    """Return the environment of TRL's process; nothing is looked up on the hub: model and data are here."""
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def run_trl(
    settings: Mapping[str, Any],
    *,
    packages: Path,
    folder: Path,
    progress: Callable[[int], None],
    command: Sequence[str] = COMMAND,
) -> Learning:
    """Train with TRL in a process of its own, which does not outlive this, and return what it wrote.

    `folder` gets `settings.json`, the log of the process, and `steps.jsonl`, a row for each step (`step`, `seconds` of
    training so far, mean `tokens` of the batch's completions) and for each `accuracy` on the held-out problems.
    `progress` is called with the steps done.

    Raises:
        TrainerError: The process failed; the message has the end of its log.
        StallError: It wrote nothing for too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, log, steps_file = folder / "settings.json", folder / "log", folder / "steps.jsonl"
    path.write_text(json.dumps(settings))
    steps_file.write_text("")
    environment = _environment(packages) | {"OMP_NUM_THREADS": str(settings["threads"])}
    with log.open("w") as output:
        process = subprocess.Popen([*command, str(path)], env=environment, stdout=output, stderr=output)
    heard, since = 0, time.monotonic()
    try:
        while process.poll() is None:
            if (size := steps_file.stat().st_size) != heard:
                heard, since = size, time.monotonic()
                progress(sum("seconds" in row for row in RunFolder(folder).read(steps_file.name)))
            if time.monotonic() - since > _SILENCE_S:
                late = f"TRL's process must do a step within {_SILENCE_S:.0f} s, got nothing: see {log}"
                raise StallError(late)
            time.sleep(_POLL_S)
    finally:
        process.kill()
        code = process.wait()
    if code != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
        raise TrainerError(f"TRL's process must end with 0, got {code}:\n{end}\nAll of it: {log}")
    rows = RunFolder(folder).read(steps_file.name)
    steps = [row for row in rows if "seconds" in row]
    if len(steps) != (wanted := settings["grpo"]["max_steps"]):
        raise TrainerError(f"TRL must do {wanted} steps, it ended after {len(steps)}: see {log}")
    seconds, tokens = (tuple(row[name] for row in steps) for name in ("seconds", "tokens"))
    accuracies = {row["step"]: row["accuracy"] for row in rows if "accuracy" in row}
    return Learning(seconds=seconds, accuracies=accuracies, tokens=tokens)


def greedy_accuracy(
    model: Any, tokenizer: Any, problems: Sequence[Sequence[str]], *, max_new_tokens: int, batch_size: int = 128
) -> float:
    """Complete problems (prompt, answer) greedily with transformers; return the share that ends in the right number.

    The model is back in its mode, training or not, when this returns; the tokenizer pads on the left from now on.
    """
    import torch

    was_training, tokenizer.padding_side = model.training, "left"
    model.eval()
    right = 0.0
    for begin in range(0, len(problems), batch_size):
        part = problems[begin : begin + batch_size]
        words = tokenizer([prompt for prompt, _ in part], padding=True, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(
                input_ids=words["input_ids"],
                attention_mask=words["attention_mask"],
                do_sample=False,
                max_new_tokens=max_new_tokens,
            )
        texts = tokenizer.batch_decode(out[:, words["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(last_number()("", text, answer) for text, (_, answer) in zip(texts, part, strict=True))
    model.train(was_training)
    return right / len(problems)


def end_rows_at(lengths: Iterator[int], *, end: int) -> Callable[..., Callable[[Any, Any], Any]]:
    """Return what makes, for each call of `transformers.generate`, a logits processor that ends each row where it must.

    Every row takes the next of `lengths`: so many tokens, of which the last is `end` and no other one.
    """
    import torch

    def processor(input_ids: Any) -> Callable[[Any, Any], Any]:
        ends_B = input_ids.shape[1] + torch.tensor([next(lengths) for _ in input_ids])

        def process(ids: Any, logits_BV: Any) -> Any:
            is_end_V = torch.arange(logits_BV.shape[1]) == end
            is_last_B = ids.shape[1] + 1 >= ends_B
            return logits_BV.masked_fill(is_end_V != is_last_B[:, None], -torch.inf)

        return process

    return processor


def main(arguments: Sequence[str]) -> None:
    """Train with the settings of a file; without one, import TRL."""
    # TRL imports vLLM wherever it finds it. It is not asked to use it here, and what is not there takes no time.
    sys.modules["vllm"] = None  # type: ignore[assignment]  # Python then refuses to import it
    if arguments:
        path = Path(arguments[0])
        _train(json.loads(path.read_text()), RunFolder(path.parent))
    else:
        importlib.import_module("trl").GRPOTrainer  # noqa: B018  # TRL imports its parts when they are asked for


def _train(settings: Mapping[str, Any], folder: RunFolder) -> None:
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # on the path of this process alone

    torch.set_num_threads(settings["threads"])
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    latest: dict[str, float] = {}
    matches = regex(**settings["regex"]) if "regex" in settings else last_number()

    def tell(**row: Any) -> None:
        folder.append("steps.jsonl", [row])

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        latest["tokens"] = sum(map(len, completion_ids)) / len(completion_ids)
        pairs = zip(completions, answer, strict=True)
        return [matches("", *pair) for pair in pairs]

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        """Reads the clock after every optimiser step; it stands still during an evaluation."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._evaluate(0, kwargs["model"])
            self._since = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now, step = time.monotonic(), state.global_step
            tell(step=step, seconds=now - self._since, **latest)
            self._evaluate(step, kwargs["model"])
            self._since += time.monotonic() - now

        def _evaluate(self, step: int, model: Any) -> None:
            every, last = settings["every"], settings["grpo"]["max_steps"]
            if every and (step % every == 0 or step == last):
                longest = settings["grpo"]["max_completion_length"]
                accuracy = greedy_accuracy(model, tokenizer, settings["problems"], max_new_tokens=longest)
                tell(step=step, accuracy=accuracy)

    prompts, answers = zip(*settings["prompts"], strict=True)
    with tempfile.TemporaryDirectory() as made:
        trainer = GRPOTrainer(
            model=settings["model"],
            reward_funcs=reward,
            args=GRPOConfig(output_dir=made, **settings["grpo"]),
            train_dataset=Dataset.from_dict({"prompt": list(prompts), "answer": list(answers)}),
            processing_class=tokenizer,
            callbacks=[Watch()],
        )
        if lengths := settings.get("lengths"):
            generate, processor = trainer.model.generate, end_rows_at(iter(lengths), end=tokenizer.eos_token_id)
            trainer.model.generate = lambda input_ids, **options: generate(
                input_ids=input_ids, logits_processor=[processor(input_ids)], **options
            )
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
