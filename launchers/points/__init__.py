"""The points of a sweep: composed, repeated, placed on a site, grouped into arrays; pure but for reading files."""
