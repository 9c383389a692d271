"""A weighted sum of what several verifiers said about one completion."""

from collections.abc import Mapping

from areal_lite.verify.protocol import Reply, checked

__all__ = ["weighted_sum"]


def weighted_sum(replies: Mapping[str, Reply], weights: Mapping[str, float]) -> Reply:
    """Return one reply for several: `reward = sum of weight * reward`, and step rewards likewise.

    Args:
        replies: By verifier.
        weights: By verifier, of the same names.

    Returns:
        A reward, with each verifier's own, unweighted, among `parts`; or a failure, where any verifier failed: a part
        of a sum is another quantity. A sum that is no number of float32 fails as `inf`.

    Example:
        >>> said = {"math": Reply(1.0), "format": Reply(0.5, parts={"tags": 0.5})}
        >>> total = weighted_sum(said, {"math": 1.0, "format": 0.2})
        >>> total.reward, total.parts
        (1.1, {'math': 1.0, 'format': 0.5, 'format/tags': 0.5})
    """
    total = 0.0
    steps: list[tuple[int, float]] = []
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    feedback: list[str] = []
    for name, reply in replies.items():
        if reply.reward is None:
            return Reply(None, f"{name}:{reply.failure}", reply.detail)
        total += weights[name] * reply.reward
        steps += [(end, weights[name] * value) for end, value in reply.step_rewards]
        parts |= {name: reply.reward} | {f"{name}/{part}": value for part, value in reply.parts.items()}
        metrics |= {f"{name}/{metric}": value for metric, value in reply.metrics.items()}
        feedback += [f"{name}: {reply.feedback}"] if reply.feedback else []
    return checked(Reply(total, None, "", parts, tuple(sorted(steps)), "\n".join(feedback), metrics))
