"""Merging the ranks of a run: which, are they one run, where, and how many at once."""
