"""Runs the workflows of a recipe: from a prompt to a sample.

Workflows that a recipe names are loaded before the first prompt; a data row chooses one in its column `workflow`.
"""

import asyncio
import copy
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from areal_lite.config.data import CHAT
from areal_lite.config.plugins import find_function, known_names
from areal_lite.config.recipe import Config
from areal_lite.config.sections import RolloutConfig
from areal_lite.errors import EngineError, EpisodeError, PluginError
from areal_lite.rollout import agents
from areal_lite.rollout.agents import is_agent
from areal_lite.rollout.commands import run_command
from areal_lite.rollout.endpoint import Endpoint
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.episode import EpisodeEngine
from areal_lite.rollout.workflows import named, single_turn
from areal_lite.types import Prompt, Sample, Score
from areal_lite.verify.builtin.sandbox import check_bubblewrap
from areal_lite.verify.protocol import read_result
from areal_lite.verify.result import VerifyResult

if TYPE_CHECKING:
    from areal_lite.rollout.vllm_engine import VllmEngine

logger = logging.getLogger(__name__)

Workflow = tuple[Callable[..., Any], Mapping[str, Any]]
"""A function and its arguments."""

_TRACE = 10_000
"""Characters of a traceback that are logged."""


@dataclass(slots=True, kw_only=True)
class Workflows:
    """The workflows of a recipe, loaded, with what their episodes need. By default only single turns."""

    default: str = "single_turn"
    """The workflow of rows that choose none, a key of `loaded`."""
    loaded: dict[str, Workflow] = field(default_factory=lambda: {"single_turn": (single_turn, {})})
    turn_timeout_s: float = 10.0
    """Seconds an episode may spend away from the engine at a stretch."""
    max_context: int = 512
    """Tokens that a call of an agent may have, its answer included."""
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1 << 30))
    """Limits the episodes that run at once, those of an evaluation included."""
    endpoint: Endpoint = field(default_factory=lambda: Endpoint(RolloutConfig()))
    """What agents call."""
    errors: dict[str, str] = field(default_factory=dict)
    """The first error of each reason."""

    async def sample(
        self, engine: "VllmEngine", prompt: Prompt, *, sampling: Sampling, seed_of: Callable[[int], int] | None
    ) -> Sample:
        """Run one episode.

        Args:
            prompt: Starts the episode; its row chooses the workflow.
            sampling: Temperature, and the tokens that a sample may have unless its row has `max_new_tokens`.
            seed_of: From the number of a request of this episode to its seed; None if nothing is random.

        Raises:
            EngineError: The engine died.
            EpisodeError: The workflow raised or returned no sample, or the engine refused its request.
        """
        episode: EpisodeEngine | None = None
        try:
            function, arguments = self._find(prompt.row.get("workflow"))
            limit = int(prompt.row.get("max_new_tokens", sampling.max_new_tokens))
            is_an_agent = is_agent(function)
            if is_an_agent:  # it makes its own prompts
                self.endpoint.start()
            async with self.gate:
                episode = EpisodeEngine(
                    engine,
                    () if is_an_agent else prompt.token_ids,
                    sampling=replace(sampling, max_new_tokens=self.max_context if is_an_agent else limit),
                    seed_of=seed_of,
                    is_chat=CHAT in prompt.row,
                    turn_timeout_s=self.turn_timeout_s,
                )
                async with episode.clock:
                    if is_an_agent:
                        sample = await agents.play(function, self.endpoint, episode, _row(prompt), limit, **arguments)
                    else:
                        match await function(episode, _row(prompt), **arguments):
                            case (turns, Score() as score):
                                sample = episode.join(turns, with_messages=True).scored(_checked(score))
                            case turns:
                                sample = episode.join(turns, with_messages=function is not single_turn)
            if isinstance(episode.failure, EngineError):
                raise episode.failure
            return sample
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # Neither sys.exit() in a user's workflow nor a task that it cancels may end the worker's task.
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise
            raise self._attributed(error, episode) from error

    def log(self, error: EpisodeError, what: str) -> None:
        """Log why something could not be generated, with the end of the traceback once per reason."""
        trace = ""
        if error.reason not in self.errors:
            lines = "".join(traceback.format_exception(error)).splitlines()
            trace = "\n".join(["", *(f"{line:.500}" for line in lines)])[-_TRACE:]
        self.errors.setdefault(error.reason, f"{error!s:.500}")
        logger.error("%s could not be generated: %s%s", what, error, trace)

    def _find(self, name: str | None) -> Workflow:
        name = self.default if name is None else name
        if name not in self.loaded:
            # Data may choose among workflows that are installed or in the recipe, but not name code.
            known = known_names("workflow")
            if name not in known:
                raise PluginError(
                    f"a column workflow must name one of {', '.join(sorted({*self.loaded, *known}))}; got {name!r}. "
                    "Fix: add it to rollout.workflows"
                )
            self.loaded[name] = _load(name, {})
        return self.loaded[name]

    def _attributed(self, error: BaseException, episode: EpisodeEngine | None) -> Exception:
        """Return the error of an episode: a dead engine's own, else one that blames the engine or the workflow."""
        failure = None if episode is None else episode.failure
        if isinstance(failure, EngineError):
            return failure
        if episode is not None and episode.clock.expired():
            limit = f"rollout.turn_timeout_s={self.turn_timeout_s:g} s"
            error = TimeoutError(f"an episode may spend {limit} away from the engine, it took longer")
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        culprit = "generation" if error is failure else "workflow"
        return EpisodeError(f"{culprit}:{type(error).__name__}: {error!s:.500}")


def load_workflows(config: Config) -> Workflows:
    """Load every workflow that a recipe names.

    Args:
        config: The recipe; sections `rollout`, `data` and `model` are read.

    Raises:
        PluginError: One cannot be found, is not async, or does not take the arguments it is given.
    """
    named.cache_clear()  # one process may serve several runs, and the user may have changed a file in between
    rollout = config.rollout
    wanted = {name: (one.function, one.arguments) for name, one in rollout.workflows.items()}
    wanted.setdefault(rollout.workflow, (rollout.workflow, rollout.workflow_arguments))
    for source in config.data.sources.values():
        if source.workflow is not None:
            wanted.setdefault(source.workflow, (source.workflow, {}))
    default, loaded = rollout.workflow, {name: _load(*one) for name, one in wanted.items()}
    if rollout.workflow_command is not None:
        if rollout.command_sandbox:
            check_bubblewrap()
        default = "workflow_command"
        loaded[default] = (
            run_command,
            {
                "command": rollout.workflow_command,
                "memory_mb": rollout.command_memory_mb,
                "is_sandboxed": rollout.command_sandbox,
            },
        )
    return Workflows(
        default=default,
        loaded=loaded,
        turn_timeout_s=rollout.turn_timeout_s,
        max_context=config.model.max_context,
        gate=asyncio.Semaphore(rollout.most_episodes),
        endpoint=Endpoint(rollout),
    )


async def complete_greedily(
    engine: "VllmEngine", prompts: Sequence[Prompt], *, max_new_tokens: int, workflows: Workflows
) -> list[Sample | None]:
    """Run the workflow of every prompt greedily, beside other work of the engine.

    Returns:
        A sample for each prompt; None if its episode failed, which is logged.

    Raises:
        EngineError: The engine died.
    """
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0.0)

    async def complete(prompt: Prompt) -> Sample | None:
        try:
            return await workflows.sample(engine, prompt, sampling=sampling, seed_of=None)
        except EpisodeError as error:
            workflows.log(error, f"held-out prompt {prompt.prompt_id}")
            return None

    return list(await asyncio.gather(*map(complete, prompts)))


def _row(prompt: Prompt) -> dict[str, Any]:
    columns = {name: value for name, value in prompt.row.items() if name not in ("verifier", "workflow")}
    # A deep copy: what an environment changes in a row must not be seen by the other samples of the group.
    return {**copy.deepcopy(columns), "prompt": prompt.text, "answer": prompt.answer}


def _checked(score: Score) -> Score:
    """Return a workflow's score with its figures read as a verifier's: True is 1, and None an error."""
    reply = read_result(VerifyResult(score.reward, score.parts, (), score.feedback, score.metrics), completion="")
    if reply.failure is not None and score.failure is None:
        raise ValueError(f"a workflow's score must be as a verifier's: {reply.detail}")
    return replace(score, reward=reply.reward, parts=reply.parts, metrics=reply.metrics)


def _load(name: str, arguments: Mapping[str, Any]) -> Workflow:
    function = find_function(name, kind="workflow")
    is_an_agent = is_agent(function)
    if not is_an_agent and not inspect.iscoroutinefunction(function):
        raise PluginError(f"a workflow must be an async function, got {name!r}. Fix: write async def")
    try:
        inspect.signature(function).bind(None, {}, **arguments)
        if check := vars(function).get("_workflow_check"):
            check(**arguments)
    except (TypeError, ValueError, ImportError) as error:
        parameters = "(task, llm)" if is_an_agent else "(engine, row)"
        raise PluginError(
            f"the workflow {name!r} is called with {parameters} and the arguments {dict(arguments)}: {error}"
        ) from error
    return function, arguments
