"""Two recorded windows side by side: which calls make a step of the second run longer or shorter."""
