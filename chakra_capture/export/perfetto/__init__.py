"""One trace of a run for Perfetto's viewer and other readers of Chrome JSON."""
