"""Long-context training with AnchorAttention."""
