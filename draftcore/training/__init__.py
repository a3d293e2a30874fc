"""The training loop and what it stands on: schedule, checkpoints, evaluation on the way."""
