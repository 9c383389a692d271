"""Generation: the adapter of vLLM's engine, workflows, and the worker that keeps an engine full."""
