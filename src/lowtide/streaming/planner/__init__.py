"""Candidate plans, their cost model, the dry run, and the choice."""
