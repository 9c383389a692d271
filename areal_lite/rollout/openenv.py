"""Environments on a server of the package `openenv-core`, for the source and workflow `gymnasium`."""

import json
from typing import Any


class OpenEnv:
    """One session on a server, with the interface of a gymnasium environment: texts in, texts out."""

    def __init__(self, *, url: str, action: str | None = None, observation: str | None = None) -> None:
        """Connect at `reset`.

        Args:
            url: The server's.
            action: Field of an action that holds the model's turn; None = the turn is the whole action, a JSON object.
            observation: Field of an observation that the model sees; None = all, as a JSON object.
        """
        from openenv import GenericEnvClient

        self._action, self._observation = action, observation
        self._client = GenericEnvClient(base_url=url).sync()

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
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
