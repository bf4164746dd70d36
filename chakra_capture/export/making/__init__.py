"""Making Chakra's .et files from merged tables: what runs, what waits for what, and both as bytes."""
