"""Feature store `mooncake` for draftcore."""

INSTALL = (
    "pip install 'draftcore-mooncake[cuda]', or 'draftcore-mooncake[cpu]' where there is no CUDA 12"
)
