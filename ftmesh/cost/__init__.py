"""Cost: what a schedule costs, how far that is from the least possible, and which is cheapest."""
