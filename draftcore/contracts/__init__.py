"""All that a plugin author imports: a file per seam, without torch at import.

`hooks` lists every hook; the other files hold what its arguments and answers are made of.
"""
