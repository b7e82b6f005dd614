"""Write packages with the evidence on failed parts, for a vendor."""
