"""Training: the model, micro-batches, the optimiser update, the RL step, supervised learning, checkpoints."""
