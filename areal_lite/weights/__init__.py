"""The weight plane: how a trainer's parameters reach the engines, and in which order."""
