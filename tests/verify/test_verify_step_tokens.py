"""Step rewards move from characters to tokens."""

from dataclasses import replace

import numpy as np
import pytest
from ledger_builders import make_sample

from areal_lite.types import Score, StepReward
from areal_lite.verify.protocol import Reply, failed
from areal_lite.verify.worker import score_of, token_of

BYTES = [b"7", b"+", b"5", b"=", "é".encode()[:1], "é".encode()[1:], b" ok", b"!"]
EOS = len(BYTES)


def decode(token_ids):
    """As a byte-level tokenizer: a broken character becomes a replacement sign, the end of sequence is left out."""
    return b"".join(BYTES[token] for token in token_ids if token != EOS).decode(errors="replace")


@pytest.mark.parametrize(
    ("end", "token"),
    [
        (1, 0),
        (4, 3),
        (5, 5),  # the é is spread over tokens 4 and 5; token 4 alone gives a replacement sign, which is one character
        (6, 6),  # within " ok"
        (8, 6),  # its end
        (9, 7),  # "!", and not the end of sequence behind it
        (99, 7),  # beyond the text: where the text ends
    ],
)
def test_a_step_ends_at_the_first_token_that_completes_it(end, token):
    """The text is "7+5=é ok!". Seen failing (4 for the é) with lengths of prefixes compared in place of their text."""
    assert token_of(end, [*range(len(BYTES)), EOS], decode) == token


def test_a_score_has_steps_at_tokens_and_everything_else_as_said():
    sample = replace(make_sample(versions=[0] * 4), token_ids=np.array([0, 1, 2, EOS], np.int32), text="7+5")
    reply = Reply(1.0, {"a": 1.0}, ((3, 0.5), (1, -0.5)), "well done", {"n": 2.0})
    assert score_of(reply, sample, decode) == Score(
        reward=1.0,
        step_rewards=(StepReward(token=2, value=0.5), StepReward(token=0, value=-0.5)),
        parts={"a": 1.0},
        metrics={"n": 2.0},
        feedback="well done",
    )
    assert score_of(failed("nan", "x"), sample, decode) == Score(failure="nan")
