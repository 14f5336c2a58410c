"""`headrace doctor`: look at everything that must be true of a running pipeline, and say the remedy for what is not."""
