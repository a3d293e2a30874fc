"""From conversations to token ids and loss masks.

`sources` opens what a run names, `conversations` reads its rows, `rendering` applies the chat template
and finds what the assistant itself produced, `parallel` does that on all cores, `dataset` keeps the
result in mapped files.
"""
