"""What must hold of a finished run, whatever happened to it: nothing lost, nothing trained twice (invariant I2)."""

from collections import Counter
from collections.abc import Mapping

from areal_lite.record.run_files import read_summary
from areal_lite.record.run_folder import RunFolder

_ENDS = ("trained", "failed", "rejected", "stale", "abandoned")
_EQUAL_FIGURES = ("loss", "grad_norm", "entropy", "reward_mean", "tokens_trained")


def check_ledger(ledger: Mapping[str, int]) -> str:
    """Return what is wrong with a ledger's final counts: every admitted group must end in exactly one state.

    >>> check_ledger({"admitted": 9, "trained": 8, "abandoned": 1, "ready": 0})
    ''
    """
    ended = {state: ledger.get(state, 0) for state in _ENDS}
    admitted = ledger.get("admitted", 0)
    if admitted == sum(ended.values()):
        return ""
    return f"admitted={admitted} groups must have ended in one state each, got {ended}"


def problems(folder: RunFolder, *, steps: int, groups_per_step: int) -> list[str]:
    """Return what is wrong with the files of a run whose `run.log_samples` was as large as a batch."""
    summary = read_summary(folder.path)
    status, ledger = summary.get("status", "without a summary"), summary.get("ledger", {})
    rows = [row["step"] for row in folder.read("metrics.jsonl")]
    prompts = Counter(row["group"].rpartition("#")[0] for row in folder.read("samples.jsonl"))
    twice = [prompt for prompt, count in prompts.items() if count > 1]
    trained, expected = ledger.get("trained"), steps * groups_per_step
    found = [check_ledger(ledger)]
    if status != "done":
        found.append(f"the run must be done, is {status}")
    if rows != list(range(1, steps + 1)):
        found.append(f"metrics.jsonl must hold steps 1 to {steps} once each, got {rows}")
    if not trained == sum(prompts.values()) == expected:
        found.append(f"{expected} groups must be trained, got {trained}, and {sum(prompts.values())} in samples.jsonl")
    if twice:
        found.append(f"every prompt must be trained once, twice or more were {', '.join(twice[:5])}")
    return [text for text in found if text]


def are_equal(folder: RunFolder, other: RunFolder) -> bool:
    """Return whether two runs trained the same, to the last bit, as they must at `queue.max_staleness: 0`."""
    figures = [[[row[name] for name in _EQUAL_FIGURES] for row in one.read("metrics.jsonl")] for one in (folder, other)]
    return figures[0] == figures[1]
