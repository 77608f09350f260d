"""A mixture's experts as one op: its form, and what one device computes of it."""
