"""Advantages, losses and log-probabilities: pure functions of tensors, called by the trainer."""
