"""A sweep directory: record, ledger, lock, code snapshot, private directories."""
