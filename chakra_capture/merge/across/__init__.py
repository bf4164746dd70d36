"""The ranks of a run held against each other: which operations are one, whose clock is off, who waited."""
