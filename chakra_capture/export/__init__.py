"""Files for other tools: Chakra's .et."""
