"""Environments behind a server of the package `openenv-core`, played by the source and workflow `gymnasium`."""

import json
from typing import Any


class OpenEnv:
    """A session of a server's, with what gymnasium's environments have: texts in, texts out."""

    def __init__(self, *, url: str, action: str | None = None, observation: str | None = None) -> None:
        """Prepare.

        Args:
            url: Of the server.
            action: Field of an action that is what the model said; None = it says the whole one, as a JSON object.
            observation: Field of an observation that the model is shown; None = all, as a JSON object.
        """
        from openenv import GenericEnvClient

        self._action, self._observation = action, observation
        self._client = GenericEnvClient(base_url=url).sync()

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        return self._shown(self._client.reset(seed=seed)), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act."""
        result = self._client.step(json.loads(action) if self._action is None else {self._action: action})
        return self._shown(result), result.reward or 0.0, result.done, False, {}

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _shown(self, result: Any) -> str:
        return (
            json.dumps(result.observation) if self._observation is None else str(result.observation[self._observation])
        )
