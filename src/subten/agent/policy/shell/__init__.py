"""Shell text to a tree, and its words to what they stand for."""
