"""Built-in plugins. They register exactly as third parties do: by entry points, through hooks."""
