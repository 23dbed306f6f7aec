"""Memory budgets, cost models, plans and measurement of a run.

Planning is pure: costs and a budget in, a `Plan` out.
"""
