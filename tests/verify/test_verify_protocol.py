"""What a verify function may return: everything it says is checked before anything trains on it."""

import errno
from fractions import Fraction

import numpy as np
import pytest
import torch
from ledger_builders import make_sample

from areal_lite.config.data import CHAT
from areal_lite.errors import VerifierUnavailable
from areal_lite.types import Score, StepReward
from areal_lite.verify.protocol import Reply, Verifier, failed
from areal_lite.verify.result import VerifyResult, batched
from areal_lite.verify.worker import score_of, token_of

INF, NAN = float("inf"), float("nan")


def reply_to(value):
    def verify(prompt, completion, answer, **row):
        return value

    (reply,) = Verifier(verify, {}).answer([("p", "three", "a", {})])
    return reply


@pytest.mark.parametrize(
    ("value", "reward"),
    [(1, 1.0), (True, 1.0), (Fraction(1, 2), 0.5), (np.float32(0.5), 0.5), (VerifyResult(0.25), 0.25),
     (np.bool_(True), 1.0), (np.array(0.5), 0.5), (torch.tensor(0.5), 0.5), (torch.tensor(True), 1.0),
     (np.array([0.5]), 0.5), (torch.tensor([[0.5]]), 0.5)],
)  # fmt: skip
def test_a_number_of_any_kind_is_a_reward(value, reward):
    """Seen failing with Python's numbers alone taken, and the last two with shape () alone."""
    reply = reply_to(value)
    assert reply == Reply(reward)
    assert type(reply.reward) is float


def test_a_result_comes_through_whole():
    result = VerifyResult(
        1, parts={"ok": True}, step_rewards=[(5, 1), (2, -0.5)], feedback="well done", metrics={"n": np.int64(3)}
    )
    assert reply_to(result) == Reply(1.0, {"ok": 1.0}, ((5, 1.0), (2, -0.5)), "well done", {"n": 3.0})


@pytest.mark.parametrize(
    ("result", "failure", "detail"),
    [
        (VerifyResult(NAN), "nan", "the reward is nan"),
        (np.array([0.5, 0.5]), "wrong_type:numpy.ndarray", "the reward: a number"),
        (VerifyResult("1"), "wrong_type:str", "the reward: a number"),
        ({"score": 1.0}, "wrong_type:dict", "areal_lite.verify.VerifyResult(reward"),
        (VerifyResult(1, parts={"x": NAN}), "nan", "parts['x'] is nan"),
        (VerifyResult(1, parts={"x": None}), "wrong_type:NoneType", "parts['x']: a number"),
        (VerifyResult(1, parts=[1.0]), "wrong_type:list", "parts: a dict"),
        (VerifyResult(1, metrics={"x": -INF}), "inf", "metrics['x'] is -inf"),
        (VerifyResult(1, feedback=3), "wrong_type:int", "feedback: a text"),
        (VerifyResult(1, step_rewards=[(5, INF)]), "inf", "the step reward at character 5"),
        (VerifyResult(1, step_rewards=[(0, 1.0)]), "bad_step_reward", "1..5 of the completion, got 0"),
        (VerifyResult(1, step_rewards=[(6, 1.0)]), "bad_step_reward", "1..5 of the completion, got 6"),
        (VerifyResult(1, step_rewards=[(2.0, 1.0)]), "bad_step_reward", "got 2.0"),
        (VerifyResult(1, step_rewards=[0.5]), "bad_step_reward", "must be pairs"),
        (VerifyResult(1, step_rewards=None), "bad_step_reward", "must be pairs"),
    ],
)
def test_whatever_is_wrong_is_a_failure_with_its_reason(result, failure, detail):
    """I7. Each was seen passing as a reward with `_problems` yielding nothing."""
    reply = reply_to(result)
    assert (reply.reward, reply.failure) == (None, failure)
    assert detail in reply.detail


@pytest.mark.parametrize(
    "result",
    [
        1e39,
        -3.4028235e38,
        pytest.param(10**400, id="huge integer"),
        VerifyResult(0, parts={"x": -1e39}),
        VerifyResult(0, step_rewards=[(1, 1e39)]),
        VerifyResult(3e38, step_rewards=[(1, 2e38)]),
        VerifyResult(0, step_rewards=[(1, 2e38), (2, 2e38)]),
    ],
)
def test_what_float32_cannot_hold_is_infinite(result):
    """Rewards train in float32, whose largest number is 3.4e38.

    Seen failing with `math.isfinite(value)` alone (but for the integer), the last two without `checked`, and
    -3.4028235e38, which a `Score` refuses, rounded to float32.
    """
    assert reply_to(result).failure == "inf"
    assert reply_to(VerifyResult(3e38, step_rewards=[(1, -2e38)])).failure is None


@pytest.mark.parametrize("after_s", [2, 0.5, NAN, INF, "soon"])
def test_a_service_may_say_when_to_ask_again(after_s):
    def verify(prompt, completion, answer, **row):
        raise VerifierUnavailable("busy", retry_after_s=after_s)

    (reply,) = Verifier(verify, {}).answer([("p", "c", "a", {})])
    assert (reply.failure, reply.retry_after_s) == ("unavailable", after_s if after_s in (2, 0.5) else 0.0)


def test_a_column_with_the_name_of_an_argument_is_no_silent_choice():
    """Seen failing with the row put over the arguments: the column won."""

    def verify(prompt, completion, answer, *, model, **row):
        return 1.0

    (reply,) = Verifier(verify, {"model": "x"}).answer([("p", "c", "a", {"model": "other"})])
    assert reply.failure == "exception:TypeError"


def test_errors_are_told_apart():
    errors = {
        "gone": VerifierUnavailable("refused"),
        "full": MemoryError(),
        "thread": RuntimeError("can't start new thread"),
        "fork": OSError(errno.ENOMEM, "Cannot allocate memory"),
        "file": FileNotFoundError("x"),
        "key": KeyError("kg"),
    }

    def verify(prompt, completion, answer, **row):
        raise errors[completion]

    def failure(completion):
        return Verifier(verify, {}).answer([("p", completion, "a", {})])[0].failure

    assert [failure(name) for name in errors] == [
        "unavailable", "memory", "memory", "memory", "exception:FileNotFoundError", "exception:KeyError"
    ]  # fmt: skip


def test_a_function_that_takes_no_further_columns_gets_no_messages():
    """The column of a chat is not the data's own. Seen failing with it handed to every function."""

    def bare(prompt, completion, answer, level):
        return level

    def named(prompt, completion, answer, level, prompt_messages):
        return len(prompt_messages)

    class Rest:
        def __call__(self, prompt, completion, answer, **row):
            return len(row)

    for function, reward in ((bare, 7), (named, 3), (Rest(), 2)):
        assert Verifier(function, {}).answer([("p", "c", "a", {"level": 7, CHAT: [{}] * 3})]) == [Reply(reward)]


def test_a_batched_function_gets_lists_and_is_checked_item_by_item():
    @batched(4)
    def verify(prompts, completions, answers, rows, **arguments):
        assert (prompts, answers, rows, arguments) == (["p", "q"], ["a", "b"], [{"n": 1}, {}], {"scale": 2})
        return [1.0, NAN]

    calls = [("p", "x", "a", {"n": 1}), ("q", "y", "b", {})]
    assert [reply.failure for reply in Verifier(verify, {"scale": 2}).answer(calls)] == [None, "nan"]


@pytest.mark.parametrize(
    ("value", "failure"), [([1.0], "wrong_length"), (1.0, "wrong_type:float"), ("ab", "wrong_type:str")]
)
def test_a_batch_without_a_result_for_each_fails_as_one(value, failure):
    @batched(4)
    def verify(prompts, completions, answers, rows):
        return value

    (reply,) = Verifier(verify, {}).answer([("p", "x", "a", {})] * 2)
    assert reply.failure == failure


# --- step rewards move from characters to tokens ---


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
    sample = make_sample(versions=[0] * 4, token_ids=np.array([0, 1, 2, EOS], np.int32), text="7+5")
    reply = Reply(1.0, {"a": 1.0}, ((3, 0.5), (1, -0.5)), "well done", {"n": 2.0})
    assert score_of(reply, sample, decode) == Score(
        reward=1.0,
        step_rewards=(StepReward(token=2, value=0.5), StepReward(token=0, value=-0.5)),
        parts={"a": 1.0},
        metrics={"n": 2.0},
        feedback="well done",
    )
    assert score_of(failed("nan", "x"), sample, decode) == Score(failure="nan")
