"""Generation: the engine protocol, its vLLM adapter, workflows, and the worker that keeps an engine full."""
