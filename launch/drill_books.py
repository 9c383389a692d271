"""What must hold of a finished run, whatever happened to it: nothing lost, nothing trained twice (invariant I2)."""

from collections import Counter
from collections.abc import Mapping

from areal_lite.record.run_files import read_summary
from areal_lite.record.run_folder import RunFolder

_ENDS = ("trained", "failed", "rejected", "stale", "abandoned")
_DRAWN_ALIKE = ("loss", "grad_norm", "entropy", "reward_mean", "tokens_trained")


def balance(ledger: Mapping[str, int]) -> tuple[bool, str]:
    """Return whether every admitted group ended in exactly one way, and the sum in words.

    >>> balance({"admitted": 9, "trained": 8, "abandoned": 1, "ready": 0})
    (True, '9 admitted = 8 trained + 1 abandoned')
    """
    ended = {state: count for state in _ENDS if (count := ledger.get(state, 0))}
    if ledger.get("admitted", 0) != sum(ended.values()):
        return False, f"not conserved: {dict(ledger)}"
    return True, f"{ledger.get('admitted', 0)} admitted = {' + '.join(f'{n} {state}' for state, n in ended.items())}"


def problems(folder: RunFolder, *, steps: int, groups_per_step: int) -> list[str]:
    """Say what of a run's files must be otherwise, where `run.log_samples` was as large as a batch."""
    summary = read_summary(folder.path)
    is_conserved, told = balance(ledger := summary.get("ledger", {}))
    trained = [row["step"] for row in folder.read("metrics.jsonl")]
    prompts = Counter(row["group"].rpartition("#")[0] for row in folder.read("samples.jsonl"))
    twice = [prompt for prompt, count in prompts.items() if count > 1]
    found = {
        f"the run must be done, is {summary.get('status', 'without a summary')}": summary.get("status") != "done",
        f"steps 1 to {steps} must stand in metrics.jsonl once each, got {trained}": trained != [*range(1, steps + 1)],
        f"every group must end in one way, got: {told}": not is_conserved,
        f"{steps * groups_per_step} groups must be trained, got {ledger.get('trained')}": ledger.get("trained")
        != sum(prompts.values())
        or ledger["trained"] != steps * groups_per_step,
        f"every prompt must be trained once, twice or more were {', '.join(twice[:5])}": bool(twice),
    }
    return [text for text, is_wrong in found.items() if is_wrong]


def are_alike(folder: RunFolder, other: RunFolder) -> bool:
    """Whether two runs drew and trained the same, to the last bit, as they must at `queue.max_staleness: 0`."""
    figures = [[[row[name] for name in _DRAWN_ALIKE] for row in one.read("metrics.jsonl")] for one in (folder, other)]
    return figures[0] == figures[1]
