"""Findings from recorded windows: a function per rule, each with at most one finding."""
