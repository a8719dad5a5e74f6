"""Sample streams and the loop that reads them on time."""
