"""From sources to a federated data set: reading, corruption, partitions, batches."""
