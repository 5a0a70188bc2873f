"""Data of a run: reading, corruption, partitions and batches."""
