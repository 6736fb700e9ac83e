"""Sample order, data sets over shards, and the batch loader."""
