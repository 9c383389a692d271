"""What the ledger refuses, and rules that the random walk of `test_ledger_machine.py` does not reach."""

import pytest
from ledger_builders import bring_to_ready, do_step, make_samples, make_scores, make_settings, play

from areal_lite.errors import LedgerError
from areal_lite.sample_queue.ledger import HeldLease, Ledger


def lend(ledger: Ledger, prompt_id: str) -> HeldLease:
    """Admit a prompt and lend it for generation."""
    ledger.admit(prompt_id)
    (lease,) = ledger.lease_rollout("r", limit=1)
    return lease


def test_refuses_results_that_do_not_fit_and_keeps_the_lease() -> None:
    ledger = Ledger(make_settings())
    rollout = lend(ledger, "a")
    with pytest.raises(ValueError, match="expected 2 samples of a#0, got 1"):
        ledger.complete_rollout(rollout.lease_id, make_samples([0]))
    with pytest.raises(ValueError, match="versions up to 0 in a#0, got version 1"):
        ledger.complete_rollout(rollout.lease_id, make_samples([0], [1]))
    with pytest.raises(LedgerError, match="is for leased_rollout, got a result for leased_verify"):
        ledger.complete_verify(rollout.lease_id, make_scores(0.0, 1.0))
    assert ledger.complete_rollout(rollout.lease_id, make_samples([0], [0]))
    (verify,) = ledger.lease_verify("v", limit=1)
    with pytest.raises(ValueError, match="one score per sample of a#0: 2, got 3"):
        ledger.complete_verify(verify.lease_id, make_scores(0.0, 1.0, 1.0))
    assert ledger.complete_verify(verify.lease_id, make_scores(0.0, 1.0))


def test_admits_no_prompt_twice_and_nothing_over_its_capacity() -> None:
    ledger = Ledger(make_settings(max_staleness=0))
    ledger.admit("p")
    with pytest.raises(LedgerError, match="'p', which is outstanding"):
        ledger.admit("p")
    ledger.admit("q")
    with pytest.raises(LedgerError, match=r"capacity\(\) > 0, got 0 at version 0 with 2 groups outstanding"):
        ledger.admit("r")


def test_refuses_batches_out_of_order() -> None:
    ledger = Ledger(make_settings())
    with pytest.raises(LedgerError, match="call take first"):
        ledger.complete_step("0")
    bring_to_ready(ledger, "a")
    bring_to_ready(ledger, "b")
    assert ledger.take("0") is not None
    for request in (ledger.take, ledger.complete_step):
        with pytest.raises(LedgerError, match="got '1' while '0' is taken"):
            request("1")
    ledger.complete_step("0")
    with pytest.raises(LedgerError, match="'0', which is complete"):
        ledger.take("0")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0.0, 1.0, 1.0), "ready"),
        ((0.0, "timeout", 1.0), "ready"),  # two scored samples remain
        ((0.0, "timeout", "crashed"), "failed(timeout)"),  # equally common: the first
        (("nan", "timeout", "timeout"), "failed(timeout)"),
        ((1.0, 1.0, 1.0), "rejected(zero_variance)"),
        ((1.0, "timeout", 1.0), "rejected(zero_variance)"),
        ((0.3, 0.1 + 0.2, 0.3), "rejected(zero_variance)"),  # equal in float32, in which they train
    ],
)
def test_verdicts(rewards: tuple[float | str, ...], expected: str) -> None:
    """Seen failing with failed samples scored 0: (1, timeout, 1) became ready; and with float64 compared."""
    ledger = Ledger(make_settings(samples_per_group=3, reject="zero_variance"))
    play(ledger, "a", make_samples([0], [0], [0]), make_scores(*rewards))
    assert ledger.counts()[expected] == 1


# The bound


@pytest.mark.parametrize(("max_attempts", "end"), [(3, "stale"), (1, "failed(too_slow)")])
def test_drop_ends_the_leases_of_the_groups_that_it_ends_alone(max_attempts: int, end: str) -> None:
    """One whose tokens are older than its admission is ended later; until then it is lent.

    Seen failing with the leases of all groups over age ended: nobody could hand it in or get it any more.
    """
    ledger = Ledger(make_settings(on_stale="drop", max_attempts=max_attempts))
    straggler = lend(ledger, "straggler")
    do_step(ledger)
    lease = lend(ledger, "old")
    assert ledger.complete_rollout(lease.lease_id, make_samples([0], [0]))
    (lease,) = ledger.lease_verify("v", limit=1)
    do_step(ledger)
    assert ledger.counts()[end] == 1  # the straggler
    assert not ledger.complete_rollout(straggler.lease_id, make_samples([0], [0]))
    assert ledger.counts()["leased_verify"] == 1
    assert ledger.complete_verify(lease.lease_id, make_scores(0.0, 1.0))


def test_drop_leaves_groups_that_wait_for_a_worker() -> None:
    """Nothing of a waiting group is old, however long it waits (here: since a resume with a smaller bound).

    Seen failing with its age counted from admission: 3 groups were stale.
    """
    ledger = Ledger(make_settings(max_staleness=3))
    for number in range(6):
        bring_to_ready(ledger, f"{number}")
    ledger.admit("patient")
    ledger = Ledger.restore(make_settings(on_stale="drop"), ledger.state())
    for step in "01":
        assert ledger.take(step) is not None
        ledger.complete_step(step)
    assert ledger.counts()["stale"] == 2  # ready ones of version 0, at version 2
    assert [lease.group.group_id for lease in ledger.lease_rollout("r", limit=1)] == ["patient#0"]


# The end, and resuming


def test_a_smaller_bound_after_a_resume_does_not_block() -> None:
    """`wait` with a bound that the restored groups cannot meet: they are trained, and the trainer masks old tokens.

    Seen failing without the clause for a batch that leaves no older group behind: take returned None forever.
    """
    ledger = Ledger(make_settings(max_staleness=3))
    for number in range(8):
        bring_to_ready(ledger, f"{number}")
    restored = Ledger.restore(make_settings(max_staleness=0, on_stale="wait"), ledger.state())
    assert restored.capacity() == 0
    assert restored.take("0") is not None
    restored.complete_step("0")
    assert restored.take("1") is None  # the rest is over age by now, and ended as stale
    assert restored.counts()["stale"] == 6
    assert restored.capacity() == 2
