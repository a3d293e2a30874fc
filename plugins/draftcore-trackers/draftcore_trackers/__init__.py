"""Trackers: what a run of draftcore tells, sent to TensorBoard, Weights & Biases, MLflow or trackio."""
