"""Drafts and small targets as GGUF files, and the engine `llamacpp`, which serves them on a CPU.

`methods` has what llama.cpp calls each kind of draft and what it would serve wrongly, `target` the same
of a target and its tokenizer, `files` writes both, `engine` starts a server in a process of its own.
"""
