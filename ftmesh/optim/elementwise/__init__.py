"""Functions of whole tensors, computed on shards of them: trace, graph, evaluate."""
