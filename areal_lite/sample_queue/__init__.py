"""sample_queue."""
