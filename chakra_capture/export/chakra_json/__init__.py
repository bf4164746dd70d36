"""The linked host and device JSON that Chakra's official ``chakra_converter`` reads, from the merged tables."""
