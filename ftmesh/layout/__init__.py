"""Pack pytrees into buckets of equal chunks, split batches, and unpack."""
