"""draftcore-vllm: vLLM as an engine that serves drafts, and as a capture, unpatched."""
