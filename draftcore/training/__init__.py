"""The training loop and what it stands on: ranks, gradients, optimizer, metrics, checkpoints."""
