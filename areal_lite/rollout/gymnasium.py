"""gymnasium environments with texts: the source `gymnasium`, whose prompts are first observations, and the workflow."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from areal_lite.config.data import Split
from areal_lite.config.plugins import PICKLE
from areal_lite.rollout.episode import EpisodeEngine, Turn, messages_of
from areal_lite.rollout.workflows import call, check_limits, checked_by, converse, named
from areal_lite.types import Score

_EVAL_SEED = 10**6


def rows(
    split: Split, *, env: str, train_size: int = 1024, eval_size: int = 64, **arguments: Any
) -> list[dict[str, Any]]:
    """Return the tasks of a split: one for each seed of the environment, whose first observation is the question.

    Args:
        env: `module:class` or `path.py:class`, or the id of a registered environment (`module:id` imports the module).
        arguments: For the class, or for `gymnasium.make`.
    """
    first, size = (0, train_size) if split == "train" else (_EVAL_SEED, eval_size)
    made = _maker(env=env)(**arguments)
    try:
        seeds = range(first, first + size)
        return [{"question": str(made.reset(seed=seed)[0]), "answer": "", "seed": seed} for seed in seeds]
    finally:
        made.close()


def _maker(*, env: str, arguments: Mapping[str, Any] | None = None, **limits: Any) -> Callable[..., Any]:
    check_limits(**limits)
    if env.endswith(PICKLE) or (":" in env and env.rpartition(":")[2].isidentifier()):
        return named(env, kind="environment")
    import gymnasium

    return partial(gymnasium.make, env)


@checked_by(_maker)
async def play(
    engine: EpisodeEngine,
    row: Mapping[str, Any],
    *,
    env: str,
    arguments: Mapping[str, Any] | None = None,
    **limits: Any,
) -> tuple[Sequence[Turn], Score]:
    """Let the model act, one action per turn; the sample's reward is the sum of the rewards of all steps.

    Each step, and the reset, may take up to `rollout.turn_timeout_s`.

    Args:
        env: As `rows` takes it.
        row: Its column `seed` resets the environment, whose first observation its prompt must hold.
        arguments: As `rows` takes them.
        limits: As `converse` takes them.
    """
    made = await engine.in_time(call(_maker(env=env), **(arguments or {})))
    rewards = []

    async def act(messages: Sequence[Mapping[str, str]]) -> tuple[str, bool]:
        shown, reward, terminated, truncated, _ = await engine.in_time(call(made.step, messages[-1]["content"].strip()))
        rewards.append(float(reward))
        return str(shown), bool(terminated or truncated)

    try:
        first, *_ = await engine.in_time(call(made.reset, seed=row["seed"]))
        if str(first).strip() not in row["prompt"]:  # the chat template may strip it
            raise ValueError(
                f"the prompt must hold the environment's first observation, {first!r:.60} for seed {row['seed']}, got "
                f"{row['prompt']!r:.60}. Fix: give the workflow the env and arguments of the source"
            )
        turns = await converse(engine, answer=act, **limits)
        own = [turn for turn in turns if not turn.is_given]
        if len(rewards) < len(own):  # the last turn gets no reply, but it is an action
            await act(messages_of(own))
        return turns, Score(reward=sum(rewards))
    finally:
        await call(made.close)
