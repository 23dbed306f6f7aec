"""Closed-form probabilistic forecasting: ridge center, conditional scale, residual paths."""
