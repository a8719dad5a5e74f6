"""Networks of our own, and parts that join those of diffusers."""
