"""A run signed by the person who stands for it: its files hashed into SHA256SUMS, and that signed with their SSH key."""
