"""Planner: candidate plans, cost model, dry run and selection."""
