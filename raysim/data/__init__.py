"""Read the data of a run, corrupt them, split them over clients and make batches."""
