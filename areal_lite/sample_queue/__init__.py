"""The sample queue: the ledger with its staleness bound, and the ZeroMQ server and clients around it."""
