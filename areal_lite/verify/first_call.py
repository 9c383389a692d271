"""A user's own verify functions are called before a run starts, as one that always raises would cost a whole start."""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from areal_lite.config.plugins import known_names
from areal_lite.config.recipe import Config
from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import VerifierError
from areal_lite.types import Prompt
from areal_lite.verify.pool import VerifierPool
from areal_lite.verify.quarantine import NOT_ITS_OWN

_ROWS = 8
_LOAD_S = 20.0
"""A function that takes longer to load is not called here: the run loads it again."""


def check_first_calls(config: Config, prompts: Iterable[Prompt]) -> None:
    """Call each verify function of the user's with a row and its answer as the completion.

    If that fails, it is called with further rows, and with an empty text: it may be meant to fail at some. Left out are

    1. known names, but for those that adapt a function of the user's: judges, sandboxes and models need more than this
       process has;
    2. rows of other workflows than `single_turn`, whose samples come with turns or scores of their own;
    3. a verifier that never ends a run, by its `max_failure_share` of 1.

    Raises:
        VerifierError: All calls of a function failed, or one took longer than its `timeout_s`, or ended the process.
    """
    weights, known = config.verifier.weights, known_names("verifier")
    workflow = "command" if config.rollout.workflow_command else config.rollout.workflow
    alone = [row for row in prompts if (row.row.get("workflow") or workflow) == "single_turn"]
    asked = {name: config.verifier.settings_of(name) for name in (*weights, *config.verifier.named)}
    pairs = [
        (settings, [row for row in alone if name in ([row.row["verifier"]] if row.row.get("verifier") else weights)])
        for name, settings in asked.items()
    ]
    for settings, chosen in [*pairs, *((watched, alone) for watched in config.reward_watch.verifiers.values())]:
        rows = chosen[:_ROWS]
        own = settings.arguments.get("function") if settings.function in known else settings.function
        if not rows or own is None or settings.max_failure_share == 1:
            continue
        with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in this one
            failure = thread.submit(asyncio.run, _failure(settings, rows, config.run.given_env)).result()
        if failure:
            chats = "; over chats `trl` passes messages, and texts with its argument chat: false"
            raise VerifierError(
                f"the verifier {own} failed before the run started: called with the answers of {len(rows)} rows, and "
                f"with an empty text, it should score one; first, for the prompt {rows[0].text!r:.80} and the "
                f"completion {rows[0].answer!r:.80}, it ended with {failure}\nFix: try it with `areal-lite verify`; "
                "where it may fail at such texts, set its max_failure_share to 1"
                f"{chats if settings.function == 'trl' else ''}"
            )


async def _failure(settings: VerifierSettings, rows: Sequence[Prompt], environment: dict[str, str]) -> str:
    """Return how the first call failed, where all did."""
    alone = {"processes": 1, "concurrency": 1, "max_failure_share": 1.0, "unavailable_s": 0.0}
    pool = VerifierPool(settings.model_copy(update=alone), start_timeout_s=_LOAD_S, environment=environment)
    first = ""
    try:
        await pool.start()
        for row, completion in [*((row, row.answer) for row in rows), (rows[0], "")]:
            (reply,) = await pool.score(row, [completion])
            if reply.failure is None or reply.failure in NOT_ITS_OWN:
                return ""
            first = first or f"{reply.failure}\n{reply.detail}"
            if reply.failure in ("timeout", "crashed"):
                break
    except VerifierError:  # what cannot be loaded ends the start
        return ""
    finally:
        await pool.close()
    return first
