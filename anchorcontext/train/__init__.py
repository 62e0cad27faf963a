"""Training: DeepSpeed engine, gradient scale, the loop, checkpoints."""
