"""areal-lite: asynchronous reinforcement learning for language models, small enough to read."""

__version__ = "0.4.0"
__all__ = ["__version__"]
