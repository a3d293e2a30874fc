"""A small recurrent language model as target, the capture that runs it, and rows of token ids."""
