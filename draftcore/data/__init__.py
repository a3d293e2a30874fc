"""From conversations to token ids and loss masks.

`conversations` reads sources, `rendering` applies the chat template and finds what the assistant
itself produced, `dataset` keeps the result in mapped files.
"""
