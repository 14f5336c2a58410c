"""`headrace top`: a snapshot of the pipeline, and what of it people see."""
