"""Remove noise from pictures, and train networks that do."""
