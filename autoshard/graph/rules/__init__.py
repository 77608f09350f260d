"""How each op kind may be split: one factor rule per kind."""
