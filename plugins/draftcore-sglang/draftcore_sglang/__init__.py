"""Captures by sglang for draftcore, in process and by servers; the first draft input of a decode server."""

INSTALL = "pip install 'draftcore-sglang[sglang]'"
