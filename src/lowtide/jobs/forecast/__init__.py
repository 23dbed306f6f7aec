"""Forecast tables, test forecasts, and train forecasters."""
