"""Generation: the engine protocol, its vLLM adapter, and the worker that keeps an engine full."""
