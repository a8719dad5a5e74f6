"""Sites that another machine has to reach: over ssh, or by a file that a person carries."""
