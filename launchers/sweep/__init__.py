"""What a sweep directory keeps: its ledger, the code as it was sent, the folders that are ours alone."""
