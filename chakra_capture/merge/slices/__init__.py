"""Cutting a smaller run out of a merged one: by steps, ranks, or the rows of one op."""
