"""From a trace to a ledger for a device."""
