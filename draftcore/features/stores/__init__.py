"""The built-in feature stores, and the pieces (`base`, `seals`) that any store may use."""
