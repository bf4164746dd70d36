"""Thin adapters that turn a framework's events into a recording session's steps; imported by their full names."""
