"""The built-in feature stores, and `base`, which any store may build on."""
