"""Hydra presets of the group ``chakra_profile`` (package data, reachable as pkg://chakra_capture.presets)."""
