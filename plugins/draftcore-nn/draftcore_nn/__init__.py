"""What draft models share, for authors of algorithms: functions and a few modules, no framework.

`layers` has norms, feed-forward, rotary positions and the target's embedding and head as a draft
uses them; `target` the sizes that a draft takes over from its target; `options` the options that
change them; `batches` the collation; `losses` cross entropy with a head of a large vocabulary;
`attention` fused kernels that can be joined with further keys; `decoding` what decoders do in every
round; `serving` the files of an export; `served` what reads these as servers do.
"""
