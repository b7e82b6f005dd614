"""Edges of the judge that the other tests do not reach: each test fails where one comparison, bound or flag is another."""
