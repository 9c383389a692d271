"""A user's own verify functions called before a run starts, as one that always raises would cost a whole start.

In a process of its own, `python -m areal_lite.verify.first_call`, which gets a function and calls on standard input,
and says how the first one failed where all do.
"""

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from areal_lite.config.plugins import find_function, known_names
from areal_lite.errors import ArealLiteError, VerifierError
from areal_lite.verify import protocol
from areal_lite.verify.codec import pack, unpack
from areal_lite.verify.quarantine import NOT_ITS_OWN

if TYPE_CHECKING:
    from areal_lite.config.recipe import Config
    from areal_lite.config.verifier import VerifierSettings
    from areal_lite.types import Prompt

_ROWS = 8


def check_first_calls(config: "Config", prompts: Iterable["Prompt"]) -> None:
    """Call each verify function of the user's with a row and its answer as the completion.

    One that fails is called with further rows, and with an empty text: it may be meant to fail at some. Left out are

    1. known names, but for those that adapt a function of the user's: judges, sandboxes and models need more than this
       process has;
    2. classes, and functions that are `prepared_by` another: they load or keep something;
    3. rows of other workflows than `single_turn`, whose samples come with turns or scores of their own;
    4. a verifier that never ends a run, by its `max_failure_share` of 1.

    Raises:
        VerifierError: All calls of a function failed, or one took longer than its `timeout_s`, or ended the process.
    """
    weights, known = config.verifier.weights, known_names("verifier")
    workflow = "command" if config.rollout.workflow_command else config.rollout.workflow
    alone = [row for row in prompts if (row.row.get("workflow") or workflow) == "single_turn"]
    for name in (*weights, *config.verifier.named):
        settings = config.verifier.settings_of(name)
        rows = [row for row in alone if name in ([row.row["verifier"]] if row.row.get("verifier") else weights)][:_ROWS]
        own = settings.arguments.get("function") if settings.function in known else settings.function
        if not rows or own is None or settings.max_failure_share == 1:
            continue
        if said := _failure(settings, own, rows, config):
            chats = "; over chats `trl` hands messages over, and texts with its argument chat: false"
            raise VerifierError(
                f"the verifier {own} must score a completion, called before anything starts with the "
                f"answers of {len(rows)} rows, and with an empty one, it failed, first with the prompt "
                f"{rows[0].text!r:.80} and the completion {rows[0].answer!r:.80}: {said}\nMend it, and try it with "
                "`areal-lite verify`; where it may fail at such texts, set its max_failure_share to 1"
                f"{chats if settings.function == 'trl' else ''}"
            )


def _failure(settings: "VerifierSettings", own: str, rows: Sequence["Prompt"], config: "Config") -> str:
    """Return how the first call failed, where all did."""
    calls = [
        (row.text, text, row.answer, {key: row.row[key] for key in row.row if key not in ("verifier", "workflow")})
        for row, text in [*((row, row.answer) for row in rows), (rows[0], "")]
    ]
    asked = pack([settings.function, own, json.dumps(settings.arguments, default=str), settings.timeout_s, calls])
    options: dict[str, Any] = {"env": os.environ | config.run.given_env, "timeout": config.run.start_timeout_s}
    try:
        done = subprocess.run([sys.executable, "-m", __name__], input=asked, capture_output=True, **options)
    except subprocess.TimeoutExpired:  # it loads something, or leaves something behind
        return ""
    # A deadline's traces, last call first, go on with the frames of the caller.
    said = done.stderr.decode(errors="replace").partition(f'  File "{protocol.__file__}"')[0].rstrip()
    return said or (f"it ended its process ({done.returncode})" if done.returncode else "")


def main(function_name: str, own: str, arguments: str, timeout_s: float, calls: Sequence[Any]) -> None:
    """Make the calls until one succeeds; what they print goes nowhere."""
    output, null = os.fdopen(os.dup(2), "w"), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if isinstance(whose := find_function(own, kind="verifier"), type) or hasattr(whose, "_verifier_prepare"):
        return
    verifier, first = protocol.Verifier(find_function(function_name, kind="verifier"), json.loads(arguments)), ""
    for call in calls:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=output)
        (reply,) = verifier.answer([call])
        if reply.failure is None or reply.failure in NOT_ITS_OWN:
            return
        first = first or f"{reply.failure}\n{reply.detail}"
    print(first, file=output, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(ArealLiteError):  # what cannot be loaded is told elsewhere
        main(*unpack(sys.stdin.buffer.read()))
    os._exit(0)  # whatever threads it has left behind
