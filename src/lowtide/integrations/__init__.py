"""What other people's programs call: their own objects, made to keep within a budget."""
