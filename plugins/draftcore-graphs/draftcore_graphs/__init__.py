"""The runner `graphs` of draftcore: capture and decoding through CUDA graphs or torch.compile."""
