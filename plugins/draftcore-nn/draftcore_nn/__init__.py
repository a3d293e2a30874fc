"""What draft models share, for authors of algorithms: functions and a few modules, no framework.

`layers` has norms, feed-forward, rotary positions and the target's embedding and head as a draft
uses them; `target` the sizes that a draft takes over from its target; `options` the options that
change them; `batches` the collation, what the host knows of a batch, and the generator of a sample;
`losses` cross entropy with a token or a distribution, over a large vocabulary, `heads` and `kernels` the
same on CUDA in half precision; `vocabulary` a draft's own vocabulary; `attention` fused kernels that can
be joined with further keys; `masks` what rows of blocks and documents see; `decoding` what decoders do
in every round, `cache` their keys and values; `serving` the files of an export; `served` what reads
these as servers do.
"""
