"""Features of the target: how they are checked, and how they reach the device that trains."""
