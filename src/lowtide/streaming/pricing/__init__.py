"""Pricing strategies for one image: candidates, each with its ledger."""
