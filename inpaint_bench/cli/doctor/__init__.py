"""`doctor`: checks of this machine, of a site file, of a compute node and of a GPU."""
