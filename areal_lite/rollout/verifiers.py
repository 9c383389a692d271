"""Environments of the package `verifiers`: a source of their tasks, and the agent `verifiers` that plays them."""

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from areal_lite.config.data import Split
from areal_lite.rollout.agents import Llm
from areal_lite.rollout.workflows import checked_by

if TYPE_CHECKING:
    from verifiers.v1 import Env


def rows(split: Split, *, env: Mapping[str, Any], train_size: int = 1024, eval_size: int = 64) -> list[dict[str, Any]]:
    """Return the tasks of a split: the first `eval_size` of the environment's are held out.

    Args:
        env: An environment as verifiers' own configuration names it: `{taskset: {id: ...}, agent: {...}}`.
    """
    first, size = (0, eval_size) if split == "eval" else (eval_size, train_size)
    tasks = islice(_environment(env=env).taskset, first, first + size)
    return [
        {"question": task.data.prompt_text, "answer": "", "task": task.data.model_dump(mode="json")} for task in tasks
    ]


def _environment(*, env: Mapping[str, Any]) -> "Env[Any]":
    import verifiers.v1 as vf

    return vf.load_environment(vf.resolve_env_config(dict(env)))


@checked_by(_environment)
async def play(task: Mapping[str, Any], llm: Llm, *, env: Mapping[str, Any]) -> dict[str, float]:
    """Play a task; the reward is the mean of the rewards of its episode's agents.

    Args:
        env: As `rows` takes it.

    Raises:
        RuntimeError: The episode failed.
    """
    import verifiers.v1 as vf

    made = _environment(env=env)
    kind = type(made.taskset).task_type()
    data = kind.data_type().model_validate(task["task"])
    # The key in a header of its own: verifiers would read it from this process's environment.
    client = vf.EvalClientConfig(base_url=llm.base_url, api_key_var="", headers={"x-api-key": llm.api_key})
    async with made.serving():  # for this rollout alone, as it keeps a client for each URL
        context = vf.ModelContext(model=llm.model, client=client)
        episode = await made.run_episode(kind(data, made.config.taskset.task), context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    parts = {name: one.value for trace in episode.traces for name, one in trace.rewards.items() if one is not None}
    return {**parts, "reward": sum(trace.reward for trace in episode.traces) / len(episode.traces)}
