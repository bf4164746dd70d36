"""What a run would have taken if something in it took another time: predictions from a replay."""
