"""Analyses: each module turns merged tables into one table, with its columns described in its SCHEMA."""
