"""Images with positions, and the loader that feeds them."""
