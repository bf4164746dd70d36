"""The training half's core: it decides which steps to record, records them, and says what it did."""
