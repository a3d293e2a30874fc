"""The feature store `file`: safetensors in a folder, on a disk or in shared memory."""
