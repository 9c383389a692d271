"""TRL's `GRPOTrainer` for `bench_peers`: its packages, its process, and what the process does.

    python benchmarks/peers_trl.py SETTINGS.json    trains; writes `steps.jsonl` beside the settings

TRL and accelerate alone, pinned, are installed into a folder of their own when they are first needed. That folder is
on the path of TRL's process and of no other; everything else (torch, transformers, datasets, numpy) is what this
project runs with. So both sides compute with the same builds, TRL changes nothing here, and 2 MB are downloaded in
place of 1 GB.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lite.errors import ConfigError, TrainerError
from areal_lite.record.run_folder import RunFolder
from areal_lite.verify.builtin.text import last_number, regex

PINS = {"trl": "1.16.0", "accelerate": "1.15.0"}
"""TRL's trainer changes its defaults between minor versions; accelerate is the one that was tried with it."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What one run shows."""

    seconds: tuple[float, ...]
    """After each step, the one of step 1 first; start-up is left out."""
    tokens: tuple[float, ...]
    """Mean completion tokens of a sample, by step."""


def ensure_trl(cache: Path, *, say: Callable[[str], None]) -> Path:
    """Return the folder of TRL's packages, which is below `cache`; installed if it is missing.

    Raises:
        ConfigError: pip failed; the message has the end of its output.
    """
    folder = cache / "_".join(["packages", *(f"{name}-{pin}" for name, pin in PINS.items())])
    if folder.is_dir():
        return folder
    say(f"installing TRL {PINS['trl']} into {folder} (once; under a minute on a good network) ...")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        pins = [f"{name}=={pin}" for name, pin in PINS.items()]
        # Without dependencies: the project's packages serve, and pip must not bring a second torch.
        options = ["--target", f"{made}/packages", "--no-deps", "--no-input", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "install", *options, *pins]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(f"cannot install {' and '.join(pins)}:\n{_end_of(done.stderr)}\nFix: check the network")
        (Path(made) / "packages").rename(folder)
    return folder


def run_trl(settings: Mapping[str, Any], *, packages: Path, folder: Path) -> Learning:
    """Train with TRL in a process of its own, and return what it wrote.

    `folder` gets `settings.json`, the log of the process, and `steps.jsonl`, a row for each step: `step`, `seconds` of
    training so far, mean `tokens` of the batch's completions.

    Raises:
        TrainerError: The process failed; the message has the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "settings.json", folder / "log"
    path.write_text(json.dumps(settings))
    (folder / "steps.jsonl").write_text("")
    search_path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": search_path,
        "OMP_NUM_THREADS": str(settings["threads"]),
        "HF_HUB_OFFLINE": "1",  # model and data are here
    }
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, __file__, str(path)], env=environment, stdout=output, stderr=output, check=False
        )
    steps, wanted = RunFolder(folder).read("steps.jsonl"), settings["grpo"]["max_steps"]
    if done.returncode != 0 or len(steps) != wanted:
        raise TrainerError(
            f"TRL must do {wanted} steps and end with 0, it did {len(steps)} and ended with {done.returncode}:\n"
            f"{_end_of(log.read_text(errors='replace'))}\nAll of it: {log}"
        )
    seconds, tokens = (tuple(row[name] for row in steps) for name in ("seconds", "tokens"))
    return Learning(seconds=seconds, tokens=tokens)


def _end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-8:])


def end_rows_at(lengths: Iterator[int], *, end: int) -> Callable[..., Callable[[Any, Any], Any]]:
    """Return a factory of logits processors, one per call of `transformers.generate`, that fix the rows' lengths.

    Every row takes the next of `lengths`: so many tokens, the last one `end`, and no earlier one.
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


def _train(settings: Mapping[str, Any], folder: RunFolder) -> None:
    # TRL imports vLLM wherever it finds it. It is not asked to use it here, and what is not there takes no time.
    sys.modules["vllm"] = None  # type: ignore[assignment]  # Python then refuses to import it
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # on the path of this process alone

    torch.set_num_threads(settings["threads"])
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    latest: dict[str, float] = {}
    matches = regex(**settings["regex"]) if "regex" in settings else last_number()

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        latest["tokens"] = sum(map(len, completion_ids)) / len(completion_ids)
        pairs = zip(completions, answer, strict=True)
        return [matches("", *pair) for pair in pairs]

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        """Reads the clock after every optimiser step."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._since = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds = time.monotonic() - self._since
            folder.append("steps.jsonl", [{"step": state.global_step, "seconds": seconds, **latest}])

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
    given = Path(sys.argv[1])
    _train(json.loads(given.read_text()), RunFolder(given.parent))
