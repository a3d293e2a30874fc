"""The plugin system: `dists` says what is installed, `registry` what is usable, `binding` what a run uses."""
