"""Peak-memory prediction: from an operator trace to a byte ledger for one device."""
