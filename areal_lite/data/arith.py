"""The built-in task: chained sums, answered step by step.

`7+25-13=?` is answered `7+25=32;32-13=19#19`: one step per operator, and the answer after `#`. The running total stays
at zero or above: a minus is always an operator, so a tokenizer of single characters needs no rule for it.
"""

import itertools
import operator
import random
import re
from collections.abc import Iterator
from dataclasses import replace

from areal_lite.config.data import ArithConfig, Split
from areal_lite.data.tasks import Task
from areal_lite.errors import ConfigError

CHARACTERS = "0123456789+-=?;#"
"""Every character a prompt or a solution can hold."""

_OPERATORS = {"+": operator.add, "-": operator.sub}
_DRAWS_PER_PROBLEM = 100
_CARELESS_ATTEMPTS = 16
"""Solutions written per problem until one ends in a wrong number; without a carry or a borrow none does."""


def arith_problems(settings: ArithConfig, split: Split) -> list[Task]:
    """Make the problems of a split, the same ones for the same settings; each is shown by its right solution.

    Held-out problems differ from each other, and their prompts never occur in training. Training problems may
    repeat where the settings allow only few; a `ConfigError` where they allow too few.
    """
    return _problems(settings, split, stream="train", count=settings.train_size)


def worked_solutions(
    settings: ArithConfig, count: int, *, seed: int, carelessness: float, split: Split = "train"
) -> list[Task]:
    """Make problems for supervised training, from a stream of their own that the seed picks; or the held-out ones.

    Args:
        carelessness: Probability, 0..1, with which a solution forgets a carry or a borrow (`7+5=2`, `12-5=17`) and
            goes on from the wrong total; `answer` stays the right one. 0 = gold solutions.
    """
    problems = _problems(settings, split, stream=f"gold/{seed}", count=count)
    rng = random.Random(f"careless/{seed if split == 'train' else 'held-out'}")
    return [_work_out(problem, rng, carelessness) for problem in problems]


def preference_pairs(settings: ArithConfig, split: Split, *, carelessness: float) -> list[tuple[str, str, str]]:
    """Return a problem's prompt, its right solution, and a careless one that ends in another number.

    Problems without a carry or a borrow cannot be got wrong that way and make no pair, so that there are fewer pairs
    than `train_size` and `eval_size`. The splits have no prompt in common.

    Raises:
        ConfigError: The settings allow too few different problems, or none that can be got wrong.
    """
    problems = _problems(settings, split, stream="pairs", count=settings.train_size)
    rng, pairs = random.Random(f"pairs/{split}"), list[tuple[str, str, str]]()
    for problem in problems:
        drafts = (str(_work_out(problem, rng, carelessness).demonstration) for _ in range(_CARELESS_ATTEMPTS))
        wrong = (draft for draft in drafts if draft.rpartition("#")[2] != problem.answer)  # two slips may cancel
        pairs += [(problem.prompt, str(problem.demonstration), draft) for draft in itertools.islice(wrong, 1)]
    if not pairs:
        raise ConfigError(
            f"data.arith must have carries or borrows to forget, got none in {len(problems)} problems with numbers up "
            f"to {settings.max_value}: raise data.arith.max_value or max_terms"
        )
    return pairs


def _problems(settings: ArithConfig, split: Split, *, stream: str, count: int) -> list[Task]:
    """Return the held-out problems, or `count` others from a stream."""
    held_out: dict[str, Task] = {}
    for problem in _draws(settings, stream="eval", count=settings.eval_size):
        held_out[problem.prompt] = problem
        if len(held_out) == settings.eval_size:
            break
    others = (one for one in _draws(settings, stream=stream, count=count) if one.prompt not in held_out)
    problems = list(held_out.values() if split == "eval" else itertools.islice(others, count))
    if len(held_out) < settings.eval_size or (split == "train" and len(problems) < count):
        raise ConfigError(
            f"data.arith must allow {settings.eval_size} different held-out problems and others to train on, got "
            f"chains of {settings.min_terms} to {settings.max_terms} numbers up to {settings.max_value}: raise "
            "data.arith.max_value or max_terms, or lower eval_size"
        )
    return problems


def _draws(settings: ArithConfig, *, stream: str, count: int) -> Iterator[Task]:
    """Draw problems, not forever: settings that allow few of them must end in an error."""
    # A text seed is hashed with SHA-512: the same problems on every machine and Python version.
    rng = random.Random(f"arith/{settings.seed}/{stream}")
    return (_draw(rng, settings, f"data.arith {stream}:{number}") for number in range(count * _DRAWS_PER_PROBLEM))


def _draw(rng: random.Random, settings: ArithConfig, origin: str) -> Task:
    total = rng.randint(1, settings.max_value)
    prompt, steps = str(total), []
    for _ in range(rng.randint(settings.min_terms, settings.max_terms) - 1):
        value = rng.randint(1, settings.max_value)
        sign = "-" if rng.random() < settings.minus_share and value <= total else "+"
        result = _OPERATORS[sign](total, value)
        steps.append(f"{total}{sign}{value}={result}")
        prompt, total = f"{prompt}{sign}{value}", result
    return Task(origin=origin, prompt=f"{prompt}=?", answer=str(total), demonstration=f"{';'.join(steps)}#{total}")


def _work_out(problem: Task, rng: random.Random, carelessness: float) -> Task:
    """Write the solution again, now and then without a carry or a borrow."""
    first, *rest = re.findall(r"\d+|[+-]", problem.prompt)
    total, steps = int(first), []
    for sign, value in zip(rest[::2], map(int, rest[1::2]), strict=True):
        result = _OPERATORS[sign](total, value)
        carries = (total % 10 + value % 10 >= 10) if sign == "+" else (total % 10 < value % 10)
        if carries and rng.random() < carelessness:
            result += -10 if sign == "+" else 10
        while result < 0:  # a wrong total may be too small to take from
            result += 10
        steps.append(f"{total}{sign}{value}={result}")
        total = result
    return replace(problem, demonstration=f"{';'.join(steps)}#{total}")
