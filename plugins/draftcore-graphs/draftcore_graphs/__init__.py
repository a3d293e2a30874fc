"""CUDA graphs for draftcore: the graph backends `full`, `breakable`, `piecewise`, and `tbo`."""
