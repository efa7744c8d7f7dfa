"""Runs functions of full tensors on shards of them: trace, then graph, then evaluate."""
