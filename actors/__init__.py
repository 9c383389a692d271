"""Ray actors: thin shells around the core."""
