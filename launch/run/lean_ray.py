"""Ray as a run needs it, where we start it: fewer processes and ports, and a quick start of actors."""

import os

from areal_lite.launch.run import setup_worker


def lean_ray() -> None:
    """Have the Ray that this process starts do without what no run uses; Ray has no settings for most of it."""
    from ray._private import node, ray_constants

    # It would warn about this variable on machines without a GPU, over the progress display.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Actors are processes of their own: those that Ray keeps ready for tasks, one for every core, have none.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # It prints no logs, does not grow, and serves neither jobs, a dashboard, nor clients of another kind than runs.
    for unused in ("start_log_monitor", "start_monitor", "start_api_server", "start_ray_client_server"):
        setattr(node.Node, unused, lambda *_, **__: None)
    ray_constants.SETUP_WORKER_FILENAME = setup_worker.__file__
