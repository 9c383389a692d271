"""Verifiers of the integration tests, named in recipes by file and function."""

import time


def digit_share(prompt: str, completion: str, answer: str, **row: object) -> float:
    """Share of the completion's characters that equal the answer: random models score now and then."""
    return completion.count(answer) / max(len(completion), 1)


def fails_on_even(prompt: str, completion: str, answer: str, **row: object) -> float:
    """Raise for every other prompt: an error, which must never become a reward."""
    if int(answer) % 2 == 0:
        raise RuntimeError("this verifier cannot read even numbers")
    return digit_share(prompt, completion, answer)


def fails_at_wrong_answers(prompt: str, completion: str, answer: str, **row: object) -> float:
    """What a typo in a verifier does where a call with the right answer does not meet it."""
    if completion != answer:
        raise NameError("name 'competion' is not defined")
    return 1.0


def takes_its_time(prompt: str, completion: str, answer: str, **row: object) -> float:
    """16 samples a step, two at a time: more than half a second for every step."""
    time.sleep(0.08)
    return digit_share(prompt, completion, answer)
