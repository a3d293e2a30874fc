"""Features of the target: the built-in capture and the built-in stores."""
