"""Replay of merged traces: the proof that their dependencies are right, and the engine of what-if."""
