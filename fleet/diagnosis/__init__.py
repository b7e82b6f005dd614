"""Find the causes behind the verdicts: what is wrong, with which part, and everything that follows from it."""
