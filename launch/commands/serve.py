"""`areal-lite serve`: one session of the endpoint that agents call in training."""

import asyncio
import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator

from rich.console import Console

from areal_lite.config.recipe import Config
from areal_lite.launch.commands.options import Model, Overrides, RecipeOption, recipe_for


def serve(
    model: Model,
    overrides: Overrides,
    recipe: RecipeOption = None,
) -> int:
    """Serve a model over the API that agents see in training.

    Print the base URL and key of one session, and serve requests until Ctrl-C. Tokens are sampled at
    rollout.temperature. Nothing is trained.
    """
    from areal_lite.record.paths import find_model_folder, with_absolute_paths
    from areal_lite.rollout.vllm_engine import check_engine_arguments

    config = recipe_for(model, recipe, overrides, console=Console())
    config = with_absolute_paths(config, ("rollout",))
    check_engine_arguments(config)
    folder = str(find_model_folder(model, option="MODEL_OR_RUN"))
    with on_own_screen() as console:
        try:
            asyncio.run(serve_model(config, folder, console=console))
        except KeyboardInterrupt:
            console.print("stopped")
    return 0


@contextlib.contextmanager
def on_own_screen() -> Iterator[Console]:
    """Yield a console for this command alone: output of vLLM and its processes is shown only after an error."""
    sys.stdout.flush()
    streams, kept = (1, 2), [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile("r+", errors="replace") as captured, os.fdopen(os.dup(1), "w") as screen:
        for stream in streams:
            os.dup2(captured.fileno(), stream)
        try:
            yield Console(file=screen)
        except Exception:
            captured.seek(0)
            with os.fdopen(os.dup(kept[1]), "w") as errors:
                errors.write(captured.read())
            raise
        finally:
            for stream, own in zip(streams, kept, strict=True):
                os.dup2(own, stream)
                os.close(own)


async def serve_model(config: Config, folder: str, *, console: Console) -> None:
    """Start an engine and serve one session until cancelled."""
    from areal_lite.rollout.endpoint import Endpoint
    from areal_lite.rollout.engine import Sampling
    from areal_lite.rollout.episode import EpisodeEngine
    from areal_lite.rollout.sessions import Session
    from areal_lite.rollout.vllm_engine import VllmEngine

    rollout = config.rollout
    endpoint = Endpoint(rollout)
    with console.status("starting the engine ..."):
        engine = await VllmEngine.start(config, model_folder=folder)
    try:
        endpoint.start()
        sampling = Sampling(max_new_tokens=config.model.max_context, temperature=rollout.temperature)
        episode = EpisodeEngine(engine, (), sampling=sampling, seed_of=None, turn_timeout_s=math.inf)
        parse = endpoint.parser(engine.tokenizer)
        session = Session(episode, max_new_tokens=rollout.max_new_tokens, parse=parse)
        async with episode.clock, endpoint.serving(session) as (root, key):
            for name, address in (("OPENAI", f"{root}/v1"), ("ANTHROPIC", root)):
                lines = f"export {name}_BASE_URL={address}\nexport {name}_API_KEY={key}"
                console.print(lines, highlight=False, soft_wrap=True)
            console.print("model: policy (any name works); Ctrl-C stops the server")
            await asyncio.Event().wait()
    finally:
        await endpoint.close()
        await engine.close()
