"""The built-in task: chained sums, answered step by step.

`7+25-13=?` is answered `7+25=32;32-13=19#19`: one step per operator, and the answer after `#`. The running total stays
at zero or above: a minus is always an operator, so a tokenizer of single characters needs no rule for it.
"""

import itertools
import operator
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from areal_lite.config.data import ArithConfig, Split
from areal_lite.errors import ConfigError

CHARACTERS = "0123456789+-=?;#"
"""Every character a prompt or a solution can hold."""

_OPERATORS = {"+": operator.add, "-": operator.sub}
_DRAWS_PER_PROBLEM = 100
_CARELESS_ATTEMPTS = 16
"""Solutions written per problem until one ends in a wrong number; without a carry or a borrow none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithProblem:
    """One chain. Example: `ArithProblem(prompt="7+25=?", solution="7+25=32#32", answer="32")`."""

    prompt: str
    solution: str
    """What a perfect policy writes."""
    answer: str
    """The number after `#`."""


def arith_problems(settings: ArithConfig, split: Split) -> list[ArithProblem]:
    """Make the problems of a split, the same ones for the same settings.

    Held-out problems differ from each other, and their prompts never occur in training. Training problems may
    repeat where the settings allow only few; a `ConfigError` where they allow too few.
    """
    return _problems(settings, split, stream="train", count=settings.train_size)


def worked_solutions(
    settings: ArithConfig, count: int, *, seed: int, carelessness: float, split: Split = "train"
) -> list[ArithProblem]:
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
        drafts = (_work_out(problem, rng, carelessness).solution for _ in range(_CARELESS_ATTEMPTS))
        wrong = (draft for draft in drafts if draft.rpartition("#")[2] != problem.answer)  # two slips may cancel
        pairs += [(problem.prompt, problem.solution, draft) for draft in itertools.islice(wrong, 1)]
    if not pairs:
        raise ConfigError(
            f"data.arith must have carries or borrows to forget, got none in {len(problems)} problems with numbers up "
            f"to {settings.max_value}: raise data.arith.max_value or max_terms"
        )
    return pairs


def _problems(settings: ArithConfig, split: Split, *, stream: str, count: int) -> list[ArithProblem]:
    """Return the held-out problems, or `count` others from a stream."""
    held_out: dict[str, ArithProblem] = {}
    for problem in _draws(settings, stream="eval", count=settings.eval_size):
        held_out[problem.prompt] = problem
        if len(held_out) == settings.eval_size:
            break
    else:
        raise _too_few(settings, f"{settings.eval_size} different held-out problems")
    if split == "eval":
        return list(held_out.values())
    draws = _draws(settings, stream=stream, count=count)
    problems = list(itertools.islice((problem for problem in draws if problem.prompt not in held_out), count))
    if len(problems) < count:
        raise _too_few(settings, f"{settings.eval_size} held-out problems and others to train on")
    return problems


def _draws(settings: ArithConfig, *, stream: str, count: int) -> Iterator[ArithProblem]:
    """Draw problems, not for ever: settings that allow few of them must end in an error."""
    # A text seed is hashed with SHA-512: the same problems on every machine and Python version.
    rng = random.Random(f"arith/{settings.seed}/{stream}")
    return (_draw(rng, settings) for _ in range(count * _DRAWS_PER_PROBLEM))


def _draw(rng: random.Random, settings: ArithConfig) -> ArithProblem:
    total = rng.randint(1, settings.max_value)
    prompt, steps = str(total), []
    for _ in range(rng.randint(settings.min_terms, settings.max_terms) - 1):
        value = rng.randint(1, settings.max_value)
        sign = "-" if rng.random() < settings.minus_share and value <= total else "+"
        result = _OPERATORS[sign](total, value)
        steps.append(f"{total}{sign}{value}={result}")
        prompt, total = f"{prompt}{sign}{value}", result
    return ArithProblem(prompt=f"{prompt}=?", solution=f"{';'.join(steps)}#{total}", answer=str(total))


def _work_out(problem: ArithProblem, rng: random.Random, carelessness: float) -> ArithProblem:
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
    return replace(problem, solution=f"{';'.join(steps)}#{total}")


def _too_few(settings: ArithConfig, wanted: str) -> ConfigError:
    return ConfigError(
        f"data.arith must allow {wanted}, got chains of {settings.min_terms} to {settings.max_terms} numbers up to "
        f"{settings.max_value}: raise data.arith.max_value or max_terms, or lower eval_size"
    )
