"""`doctor`: checks of this machine, of a site file and of a GPU."""
