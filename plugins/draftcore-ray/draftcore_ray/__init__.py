"""The launcher `ray`: ranks and producers of a run on the machines of a Ray cluster."""
