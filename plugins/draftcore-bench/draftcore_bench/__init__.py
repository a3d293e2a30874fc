"""What a draft gains on a running server: acceptance, tokens per second, speed-up."""
