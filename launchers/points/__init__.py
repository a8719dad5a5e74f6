"""The points of a sweep: compose, repeat, place on a site, group into arrays. Reads files only."""
