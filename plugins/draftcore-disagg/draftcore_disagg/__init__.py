"""Capture and training as processes of their own: the queue, its channel, producers, the launcher."""
