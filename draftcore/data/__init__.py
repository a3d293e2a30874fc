"""From rows to a plan: which rows make a batch, what each step trains on, and what is left out."""
