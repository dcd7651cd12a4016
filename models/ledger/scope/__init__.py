"""What the ledger covers, feature by feature. A job outside is named with its reason."""
