"""Verifiers of the integration tests, named in recipes by file and function."""

import itertools
import time


def digit_share(prompt: str, completion: str, answer: str, **row: object) -> float:
    """Share of the completion's characters that equal the answer: random models score now and then."""
    return completion.count(answer) / max(len(completion), 1)


_CALLS = itertools.count()


def breaks_down(prompt: str, completion: str, answer: str, **row: object) -> float:
    """Raise for some prompts, and after 150 calls for all: an error, which must never become a reward."""
    if int(answer) % 4 == 0 or next(_CALLS) >= 150:
        raise RuntimeError("this verifier cannot read such numbers")
    return digit_share(prompt, completion, answer)


def takes_its_time(prompt: str, completion: str, answer: str, **row: object) -> float:
    """16 samples a step, two at a time: more than half a second for every step."""
    time.sleep(0.08)
    return digit_share(prompt, completion, answer)
