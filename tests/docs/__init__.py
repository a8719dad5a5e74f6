"""The documentation: its code appears on the site, its commands exist, what it shows is what they print."""
