"""The arithmetic task in TRL's `GRPOTrainer`: what `areal-lite bench peers` runs beside its own trainer.

    python -P peers_trl.py SETTINGS.json    trains; each line on stdout is a JSON object, see `tell`
    python -P peers_trl.py                  only imports what it would use: whether the environment is whole

The first runs in the environment that `peers_process.py` makes and imports nothing of areal_lite. `last_number` and
`greedy_accuracy` are used for both sides.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

__all__ = ["Clock", "greedy_accuracy", "last_number", "read_line", "tell"]

_NUMBER = re.compile(r"(?:(?<![0-9])-)?(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)")


def last_number(completion: str, answer: str) -> float:
    """Score 1 where the number behind the last `#` is that of the answer, else 0: the verifier `last_number`.

    >>> last_number("7+25=32;32+13=45#45", "45"), last_number("7+25=32#", "32")
    (1.0, 0.0)
    """
    found, expected = (_NUMBER.findall(text.rpartition("#")[2])[-1:] for text in (completion, answer))
    return float([_value(number) for number in found] == [_value(number) for number in expected])


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
        right += sum(last_number(text, answer) for text, (_, answer) in zip(texts, part, strict=True))
    model.train(was_training)
    return right / len(problems)


class Clock:
    """Seconds since it was made; it stands still inside `paused`."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Read it."""
        return time.monotonic() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside."""
        paused = time.monotonic()
        yield
        self._since += time.monotonic() - paused


def tell(kind: str, **content: Any) -> None:
    """Print one JSON line, for `read_line`.

    `step`       step, seconds of training so far, reward (mean of the batch), tokens (mean of its completions)
    `accuracy`   step, accuracy on the held-out problems; while it is measured the clock of `step` stands still
    """
    print(json.dumps({"peer": kind, **content}), flush=True)


def read_line(line: str) -> dict[str, Any] | None:
    """Return what a line of stdout tells; None for one that somebody else printed."""
    if not line.startswith('{"peer": '):
        return None
    content: dict[str, Any] = json.loads(line)
    return content


def main(arguments: Sequence[str]) -> None:
    """Train as a file of settings says; without one, import TRL."""
    # TRL imports vLLM wherever it finds it. It is not asked to use it here, and what is not there takes no time.
    sys.modules["vllm"] = None  # type: ignore[assignment]  # Python's way to say that a module cannot be imported
    if arguments:
        with open(arguments[0]) as file:
            _train(json.load(file))
    else:
        from trl import GRPOTrainer  # type: ignore[import-not-found]  # lives in another environment

        assert GRPOTrainer is not None


def _train(settings: Mapping[str, Any]) -> None:
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    latest: dict[str, float] = {}

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores = [last_number(*pair) for pair in zip(completions, answer, strict=True)]
        latest["reward"] = sum(scores) / len(scores)
        latest["tokens"] = sum(map(len, completion_ids)) / len(completion_ids)
        return scores

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        """Reads the clock after every optimiser step, and stops it for an evaluation."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._evaluate(0, kwargs["model"])
            self._clock = Clock()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            tell("step", step=step, seconds=self._clock.seconds(), **latest)
            with self._clock.paused():
                self._evaluate(step, kwargs["model"])

        def _evaluate(self, step: int, model: Any) -> None:
            every, last = settings["every"], settings["grpo"]["max_steps"]
            if every and (step % every == 0 or step == last):
                longest = settings["grpo"]["max_completion_length"]
                accuracy = greedy_accuracy(model, tokenizer, settings["problems"], max_new_tokens=longest)
                tell("accuracy", step=step, accuracy=accuracy)

    prompts, answers = zip(*settings["prompts"], strict=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=settings["model"],
            reward_funcs=reward,
            args=GRPOConfig(output_dir=folder, **settings["grpo"]),
            train_dataset=Dataset.from_dict({"prompt": list(prompts), "answer": list(answers)}),
            processing_class=tokenizer,
            callbacks=[Watch()],
        )
        trainer.train()


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


if __name__ == "__main__":
    main(sys.argv[1:])
