"""What every job does: plan an item, run it within the budget, commit it, report it, resume."""
