"""What a vendor is given about a failed part."""
