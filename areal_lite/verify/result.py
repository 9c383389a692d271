"""What a verify function may return, and its decorators. Verifiers import this, so it imports little."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
Texts = Sequence[str]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """A reward with its parts, steps, feedback and metrics. A plain number does where there is only a reward.

    Example: `VerifyResult(0.7, parts={"correct": 1.0, "brief": -0.3}, step_rewards=[(12, 0.5)], feedback="well done")`
    """

    reward: float | None
    """For the outcome, in units of reward; None = it does not apply to this completion: no part of a sum, and a failure
    where nothing else applies."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of, by name; shown as means, never added up again."""
    step_rewards: Sequence[tuple[int, float]] = ()
    """Process supervision: `(end_character, value)` for a step that ends before that character of the completion.
    Beside `reward`: a sample earns the sum of both."""
    feedback: str = ""
    """A text for people."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures, by name; shown as means."""


def prepared_by(prepare: Callable[..., object]) -> Callable[[F], F]:
    """Decorate a verify function: `prepare` runs before its first call, with the recipe's arguments.

    Of a class it runs with the instance that was made with them.
    """
    return marked(_verifier_prepare=prepare)


def batched(size: int) -> Callable[[F], F]:
    """Decorate a verify function that scores up to `size` completions in one call.

    It is called as `verify(prompts, completions, answers, rows, **arguments)`, each a list of equal length, `rows` of
    dicts, and returns a list with one number or `VerifyResult` for each.
    """
    return marked(_verifier_batch=size)


def any_reference(function: F) -> F:
    """Decorate a verify function: where the data holds a list of right answers, the best of their scores counts."""

    @functools.wraps(function)
    def verify(*call: Any, reference_answers: Sequence[str] = (), **row: Any) -> Any:
        *before, answer = call
        return max(function(*before, one, **row) for one in reference_answers or [answer])

    return cast(F, verify)


def marked(**marks: Any) -> Callable[[F], F]:
    """Decorate a function or class: it gets these attributes."""

    def mark(function: F) -> F:
        for name, value in marks.items():
            setattr(function, name, value)
        return function

    return mark
