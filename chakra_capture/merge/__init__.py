"""Linking: one rank's host and device trace become the tables of ``trace.schema``."""
